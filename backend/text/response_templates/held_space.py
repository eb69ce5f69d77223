"""Space at the end of a text that comes piece by piece, which belongs to it only if more comes."""


class HeldSpace:
    """Holds space back. A piece costs by its own length, however much is held: a client may have a model write spaces
    alone.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str, stripped: str) -> str:
        """Take a piece, and the same without space at its end; return what is text by now."""
        if not stripped:
            self._pieces.append(text)
            return ""
        whole = "".join([*self._pieces, stripped])
        self._pieces = [text[len(stripped) :]]
        return whole
