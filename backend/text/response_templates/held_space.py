"""Space at the end of a text that comes in pieces, which belongs to the text only if more comes."""


class HeldSpace:
    """Holds space back. A piece costs by its own length, however much is held, because a client may have a model write
    spaces alone.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str, stripped: str) -> str:
        """Push a piece, and the same piece without space at its end; returns the text that is now certain."""
        if not stripped:
            self._pieces.append(text)
            return ""
        whole = "".join([*self._pieces, stripped])
        self._pieces = [text[len(stripped) :]]
        return whole
