"""Asks a vLLM server the same long question twice: what it took, and how much was cached.

    python client.py [http://localhost:8000]

The second answer's prefix comes from vLLM's own cache. Stop the server, start it again and run this
once more: then the first answer's prefix comes from NVMe.
"""

import sys
import time

from openai import OpenAI

WORDS = "the roots keep all winter in the cellar if nobody leaves the door open"
QUESTION = "\n".join(f"Day {day}: {WORDS}." for day in range(200)) + "\nHow long do the roots keep?"


def main() -> None:
    server = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    model = client.models.list().data[0].id
    for _ in range(2):
        began_s = time.perf_counter()
        answer = client.completions.create(
            model=model, prompt=QUESTION, max_tokens=1, temperature=0
        )
        took_ms = 1000 * (time.perf_counter() - began_s)
        usage = answer.usage
        assert usage is not None, "the server tells no usage"
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        print(f"{took_ms:8.1f} ms   {cached} of {usage.prompt_tokens} prompt tokens cached")


if __name__ == "__main__":
    main()
