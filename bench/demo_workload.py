"""What the demo serves: conversations shipped with the project, or prompts read from a file.

A turn adds tokens to its conversation; its prompt is everything said there so far, replies
included. A prompt read from a file is a conversation of one turn.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

Encode = Callable[[str], list[int]]

MAX_REQUESTS = 40
MAX_PROMPT_TOKENS = 4096
"""Beyond these a file is cut short, so that a run takes a minute or two; the report says so."""

_TEXTS = Path(__file__).with_name("texts")

_SCHEDULE = "ABABCACDBDCEDEAFEFBFCEDF"
"""Which conversation speaks next: some return at once, some after one other, some after many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request: these tokens continue this conversation."""

    conversation: str
    label: str
    tokens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Turns in the order of their arrival; notes say what was left out of the source."""

    turns: list[Turn]
    notes: list[str]

    def distinct_tokens(self, chunk_tokens: int) -> int:
        """Tokens that a store would hold of all prompts, in whole chunks, replies left out."""
        chunks: set[tuple[int, ...]] = set()
        for prompt in self._prompts():
            stops = range(chunk_tokens, len(prompt) + 1, chunk_tokens)
            chunks.update(tuple(prompt[:stop]) for stop in stops)
        return len(chunks) * chunk_tokens

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, replies left out."""
        return max(map(len, self._prompts()))

    def _prompts(self) -> Iterator[list[int]]:
        spoken: dict[str, list[int]] = {}
        for turn in self.turns:
            prompt = spoken.setdefault(turn.conversation, [])
            prompt += turn.tokens
            yield prompt


def shipped_workload(encode: Encode) -> Workload:
    """Six conversations under one system prompt, from bench/texts."""
    system = encode((_TEXTS / "system_prompt.txt").read_text("utf-8"))
    lines = (_TEXTS / "sessions.jsonl").read_text("utf-8").splitlines()
    conversations = [cast("dict[str, Any]", json.loads(line)) for line in lines]
    turns: list[Turn] = []
    for position, letter in enumerate(_SCHEDULE):
        conversation = conversations[ord(letter) - ord("A")]
        said = _SCHEDULE[:position].count(letter)
        tokens = encode(conversation["turns"][said])
        turns.append(
            Turn(
                conversation=conversation["name"],
                label=f"{conversation['name']} {said + 1}",
                tokens=tokens if said else system + tokens,
            )
        )
    return Workload(turns=turns, notes=[])


def file_workload(path: Path, encode: Encode, max_prompt_tokens: int) -> Workload:
    """Prompts from JSON lines of {"input": text or list of chat messages}, in their order.

    Empty inputs are skipped; the first MAX_REQUESTS prompts are taken, each cut to its first
    max_prompt_tokens. Raises ValueError naming the line that is none of these, or when no
    prompt is left.
    """
    texts = _read_inputs(path)
    prompts = [encode(text) for text in texts if text]
    turns = [
        Turn(conversation=f"line {n}", label=f"prompt {n}", tokens=prompt[:max_prompt_tokens])
        for n, prompt in enumerate(prompts[:MAX_REQUESTS], 1)
    ]
    if not turns:
        raise ValueError(f"{path} holds no prompt")
    return Workload(turns=turns, notes=_what_was_left_out(texts, prompts, max_prompt_tokens))


def _read_inputs(path: Path) -> list[str]:
    texts: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    texts.append(_as_text(json.loads(line)["input"]))
                except (KeyError, TypeError, ValueError) as error:
                    expected = '{"input": text or list of {"role", "content"}}'
                    raise ValueError(f"{path}, line {number}: must be {expected}") from error
    return texts


def _as_text(content: Any) -> str:
    """Text of an input, of a message's content, or of a list of messages or parts of one."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n\n".join(_as_text(item) for item in content)
    if isinstance(content, dict):
        item = cast("dict[str, Any]", content)
        if "role" in item:
            return f"{item['role']}: {_as_text(item.get('content'))}"
        return _as_text(item["text"])
    raise TypeError(f"{content!r} is no text")


def _what_was_left_out(
    texts: Sequence[str], prompts: Sequence[list[int]], max_prompt_tokens: int
) -> list[str]:
    notes: list[str] = []
    taken = prompts[:MAX_REQUESTS]
    if empty := len(texts) - len(prompts):
        notes.append(f"{empty} of {len(texts)} inputs are empty and were skipped")
    if len(taken) < len(prompts):
        notes.append(f"only the first {len(taken)} of {len(prompts)} prompts were taken")
    if cut := sum(len(prompt) > max_prompt_tokens for prompt in taken):
        notes.append(
            f"{cut} of {len(taken)} prompts were cut to their first {max_prompt_tokens} tokens"
        )
    return notes
