"""CachedModel: generate() of a transformers model, served from HBM, DRAM and NVMe.

A request's prompt is matched in the radix tree over HBM pages, continued by whole chunks from the
cold tiers, and only the rest is prefilled:

    prompt   [0 ......... hbm)[hbm ......... cold)[cold ......... n)
             tree and pages    chunks              computed, at least one token

Afterwards the KV of prompt and generated tokens (all but the last, whose KV never existed) enters
the tree, and its full chunks are offered to the store.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList

from ..admission.base import Boundary
from ..kernels import PagedKV
from ..tiers.base import Key, Tier
from ..tiers.config import StoreConfig
from ..tiers.device import device_of
from ..tiers.errors import StoreClosedError
from ..tiers.keys import chunk_keys, extend_keys
from ..tiers.layout import Namespace
from ..tiers.pages import PagePool
from ..tiers.radix import Match, RadixTree
from ..tiers.store import TieredStore
from .arriving_cache import ArrivingKV
from .copies import ColdCopies, copy_pages
from .dynamic_cache import cache_pages, model_layout
from .model_identity import ModelWatch, model_namespace
from .served import FirstToken, Served
from .unsupported import cache_argument, check_model, check_request

Tokens = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]

_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
_log = logging.getLogger(__name__)


class CachedModel:
    """A transformers model whose generate() reuses the KV of every prefix it has seen.

    hbm_tokens: size of the page pool on the model's device, in tokens, at least 1.
    Raises UnsupportedModelError, before anything is opened, for a model whose KV cannot be reused
    rightly. Like the model itself, for one thread at a time. Weights edited between calls are
    noticed, and make a new namespace. `store` is closed with this object, which holds its directory
    until then.
    """

    def __init__(self, model: PreTrainedModel, config: StoreConfig, *, hbm_tokens: int) -> None:
        if type(hbm_tokens) is not int or hbm_tokens < 1:
            raise ValueError(f"hbm_tokens is {hbm_tokens!r}, must be a whole number of at least 1")
        self.model = model
        self.last: Served | None = None
        """The last request that was served to its end."""
        self._config = config
        self._hbm_tokens = hbm_tokens
        self._closed = False
        self._watch = ModelWatch(model)
        self._open(model_namespace(model, model_layout(model)))

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, *, salt: str | bytes | None = None, **arguments: Any
    ) -> Any:
        """What `model.generate(input_ids, **arguments)` returns, for one unpadded prompt.

        salt: keeps KV apart; only requests with an equal salt share any.
        Raises UnsupportedRequestError for arguments that cannot be served, before anything
        changes, and whatever the model, a streamer or a stopping criterion raises.
        """
        start_s = time.perf_counter()
        if self._closed:
            raise StoreClosedError("generate was called on a closed CachedModel")
        check_request(self.model, input_ids, arguments)
        self._follow_model()
        watch = self._watch  # another one, if a streamer of this call has one of its own made
        tokens = _as_int32(input_ids)
        keys = chunk_keys(tokens, self._namespace, salt=salt)
        self.store.observe(keys, len(tokens))
        # What was copied or written down meanwhile gives its slots back before a load needs them.
        self._poll()
        cache, by_tier = self._restore(tokens, keys, salt)
        loading = self._copies.loading
        first_token = FirstToken(each_step=self._poll)
        prefill_s = time.perf_counter()
        output = self._run(input_ids, cache, first_token, arguments)
        if first_token.at_s and not loading:  # else prefill has waited for the link, too
            computed = len(tokens) - by_tier.total()
            self.store.observe_prefill(computed, first_token.at_s - prefill_s)
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        if watch is self._watch and not watch.changed():  # else part of the KV is another model's
            self._try_to_keep(_as_int32(sequence)[: cache.get_seq_length()], keys, cache, salt)
        if sequence is not output:  # the caller gets the cache, too, and may write to it
            self._copies.wait()
        self.last = Served.of(len(tokens), by_tier, first_token.at_s - start_s)
        return output

    def close(self) -> None:
        """Write down what is admitted, and release the tiers. Idempotent."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, namespace: Namespace) -> None:
        self._step = namespace.layout.chunk_tokens
        # Pages allocated in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.pool = PagePool(namespace.layout, self._hbm_tokens, device=self.model.device)
        self._pages = PagedKV.of_slots(self.pool.pages)
        device = device_of([self.pool.pages])
        self.tree = RadixTree()
        self.store = TieredStore(self._config, namespace)
        try:
            self._copies = ColdCopies(self.store, self._config, device, self.pool.pages.device)
        except BaseException:
            self.store.close()
            raise
        self._namespace = namespace  # last: had anything failed, the next request opens again

    def _release(self) -> None:
        try:
            self._copies.close()  # first: copies under way read and write the store's slots
        finally:
            self.store.close()

    def _poll(self) -> None:
        self._copies.poll()
        self.store.poll()

    def _follow_model(self) -> None:
        """Changed weights or settings are another model: its KV starts from nothing."""
        check_model(self.model)
        if not self._watch.changed():
            return
        watch = ModelWatch(self.model)
        namespace = model_namespace(self.model, model_layout(self.model), trust_commit=False)
        if namespace != self._namespace:
            self._release()
            self._open(namespace)
        self._watch = watch

    def _restore(
        self, tokens: Tokens, keys: list[Key], salt: str | bytes | None
    ) -> tuple[DynamicCache, Counter[Tier]]:
        """A cache of the longest prefix the tiers hold, short of the last token, and from where.

        Chunks of the cold tiers may still be on their way into it.
        """
        room = self._namespace.layout, len(tokens), self.pool.pages.device
        kv = ArrivingKV(*room)
        try:
            by_tier = self._fill(kv, tokens, keys, salt)
        except _NO_MEMORY:
            _log.warning("no memory for what is stored of a prompt: it is computed", exc_info=True)
            kv, by_tier = ArrivingKV(*room), Counter()
        return kv.cache(self.model.config), by_tier

    def _fill(
        self, kv: ArrivingKV, tokens: Tokens, keys: list[Key], salt: str | bytes | None
    ) -> Counter[Tier]:
        """How many tokens come from where."""
        by_tier = Counter[Tier]()
        with self._pinned_match(tokens[:-1], salt) as match:
            if match.num_tokens:
                here = np.arange(match.num_tokens)
                copy_pages(self._pages, match.slots, kv.pages, here, at_once=self._step)
                kv.extend(match.num_tokens)
                by_tier[Tier.HBM] = match.num_tokens
        return by_tier + self._copies.load(keys[: (len(tokens) - 1) // self._step], kv)

    def _run(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache,
        first_token: FirstToken,
        arguments: dict[str, Any],
    ) -> Any:
        given = arguments.get("stopping_criteria") or ()
        ours: dict[str, Any] = {
            "stopping_criteria": StoppingCriteriaList([first_token, *given]),
            cache_argument(self.model): cache,
        }
        model: Any = self.model
        return model.generate(input_ids, **(arguments | ours))

    def _try_to_keep(
        self, tokens: Tokens, keys: list[Key], cache: DynamicCache, salt: str | bytes | None
    ) -> None:
        try:
            self._keep(tokens, keys, cache, salt)
        except _NO_MEMORY:
            _log.warning("no memory to keep the KV of a reply", exc_info=True)

    def _keep(
        self, tokens: Tokens, keys: list[Key], cache: DynamicCache, salt: str | bytes | None
    ) -> None:
        """Insert `tokens`, all of which `cache` holds, in the tree and offer them to the store."""
        chain = extend_keys(keys, tokens, self._namespace, salt=salt)
        pages = cache_pages(cache)
        self._copies.store(chain, pages)
        with self._pinned_match(tokens, salt) as match:
            admitted = self._admitted(len(tokens), match.num_tokens, chain)
            slots = self._reserve(admitted - match.num_tokens)
            stop = match.num_tokens + len(slots)
            new = np.arange(match.num_tokens, stop)
            try:
                copy_pages(pages, new, self._pages, slots, at_once=self._step)
                held = np.concatenate([match.slots, slots])
            except BaseException:
                self.pool.free(slots)
                raise
            self.tree.insert(tokens[:stop], held, extra=salt)

    def _admitted(self, num_tokens: int, num_held: int, chain: list[Key]) -> int:
        """How many of num_tokens may be in the tree, which holds num_held. Where not all fit, so
        that others must go, admission decides chunk by chunk; the store has the rest."""
        if num_tokens - num_held <= self.pool.num_free:
            return num_tokens
        start, free_chunks = num_held // self._step, self.pool.num_free // self._step
        stop = self.store.admits(Boundary.INTO_HBM, chain, start, free_chunks)
        return num_tokens if stop == len(chain) else max(num_held, stop * self._step)

    def _reserve(self, num_tokens: int) -> Slots:
        """Free slots for num_tokens, evicting from the tree for them; fewer if all is pinned."""
        shortfall = num_tokens - self.pool.num_free
        if shortfall > 0:
            self.pool.free(self.tree.evict(shortfall))
        slots = self.pool.allocate(min(num_tokens, self.pool.num_free))
        assert slots is not None
        return slots

    @contextmanager
    def _pinned_match(self, tokens: Tokens, salt: str | bytes | None) -> Iterator[Match]:
        """The longest prefix in the tree, whose slots stay as they are inside the block."""
        match = self.tree.match(tokens, extra=salt)
        self.tree.pin(match.node)
        try:
            yield match
        finally:
            self.tree.unpin(match.node)


def _as_int32(input_ids: torch.Tensor) -> Tokens:
    """Token ids (1, n) on any device as n int32."""
    return input_ids[0].to("cpu", torch.int32).numpy()
