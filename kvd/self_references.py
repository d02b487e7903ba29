"""Objects that refer to themselves: only a full collection frees them, and those are rare here."""

from __future__ import annotations


def forget_itself(thing: object) -> None:
    """Take an object's own bound methods out of its attributes; nobody calls it any more.

    asyncio's transports keep the method to call when there is something to read, and to write.
    """
    attributes = getattr(thing, "__dict__", {})
    for name, value in list(attributes.items()):
        if getattr(value, "__self__", None) is thing:
            del attributes[name]
