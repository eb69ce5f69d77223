"""The errors that the backend raises on purpose:

BackendError
├── ConfigError          settings that contradict each other or the model; the message carries the arithmetic
├── ModelLoadError       a checkpoint that cannot be served: names the file, the tensor or key, and the remedy
├── InvalidRequest       one request that can never run: names the field, the limit and the request's value
│   ├── TooManyTokens    a text that encodes to more tokens than was asked for
│   └── GrammarInvalid   a grammar that cannot be enforced; the message names the part
│       └── GrammarTooComplex  a grammar that takes more time or memory to compile than it may
└── DeviceError          the device failed and cannot be trusted again; every stream ends, the process exits
    └── MemoryExhausted  it had no memory for one step, which is planned again with less if possible

Errors of torch, safetensors, tokenizers and jinja2 are translated into these where they are caught, never passed on.
"""


class BackendError(Exception):
    """The base of everything that the backend raises on purpose."""


class ConfigError(BackendError):
    """The settings contradict each other, the model, or the machine."""


class ModelLoadError(BackendError):
    """The model directory cannot be served."""


class InvalidRequest(BackendError):
    """The request can never run on this engine.

    `param` is the name of the offending field as the client wrote it.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TooManyTokens(InvalidRequest):
    """The text encodes to more tokens than it may have: to `num_tokens`, or to more if they are `at_least` the
    count.
    """

    def __init__(self, num_tokens: int, most: int, at_least: bool = False) -> None:
        super().__init__(f"the text has {num_tokens} tokens, and at most {most} may be had", "prompt")
        self.num_tokens = num_tokens
        self.at_least = at_least


class GrammarInvalid(InvalidRequest):
    """The requested grammar is malformed, or has parts that cannot be enforced."""

    def __init__(self, message: str, param: str = "grammar") -> None:
        super().__init__(message, param)


class GrammarTooComplex(GrammarInvalid):
    """Compiling the grammar takes more time or memory than it may."""


class DeviceError(BackendError):
    """The device failed; its state cannot be trusted."""


class MemoryExhausted(DeviceError):
    """The device had no memory for a step, and its state is as before the step, even if it computed part of it."""
