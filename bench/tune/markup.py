"""HTML and SVG from nested calls. Text is escaped unless it is markup already, so that no name of a
file or a policy can become part of the page; what comes out is well-formed XML as well."""

import re
from html import escape

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not know, and lone surrogates, which UTF-8 cannot say."""


class Html(str):
    """Markup: put into an element as it is."""

    __slots__ = ()


def text(words: str) -> Html:
    """Words as they are to be read; a character that cannot be shown becomes U+FFFD."""
    return words if isinstance(words, Html) else Html(escape(_UNPRINTABLE.sub("\ufffd", words)))


def prose(words: str) -> Html:
    """Words in which no line breaks between a number and its unit."""
    return text(re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", words))


def join(*content: str) -> Html:
    """Pieces of text and markup, one after the other."""
    return Html("".join(text(part) for part in content))


def element(name: str, *content: str, **attributes: str | float | None) -> Html:
    """<name …>content</name>.

    An attribute's underscores stand for dashes, one at its end is dropped (`class_`), one that is
    None is left out; numbers are rounded to what a screen can show.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>{join(*content)}</{name}>")


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 1):g}"
