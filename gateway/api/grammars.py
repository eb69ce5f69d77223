"""Has the grammar of a request compiled for its tenant, and says in the API's words why not."""

from collections.abc import Callable

from backend import errors
from backend.grammar import Grammar
from backend.structured_output.compiler import CompiledGrammar, GrammarCompiler, TooManyGrammars
from backend.structured_output.processes import NoGrammarProcess
from gateway.errors import BadRequest
from gateway.grammar_errors import GrammarsExceeded, GrammarsUnavailable, InvalidGrammar, TooComplexGrammar

GRAMMAR = "grammar"  # the field that errors name, until whoever knows what the client called it says so
RETRY_SECONDS = 1.0

Release = Callable[[], object]


async def hold_grammar(compiler: GrammarCompiler | None, grammar: Grammar, key: str) -> Release:
    """Returns what is to be called once nothing needs the compiled grammar any more. Raises `ApiError`."""
    if compiler is None:
        raise BadRequest("This server constrains no answers: it was started with --grammar-processes 0.", GRAMMAR)
    try:
        compiled = await compiler.acquire(grammar, key)
    except errors.GrammarTooComplex as error:
        raise TooComplexGrammar(f"{_sentence(error)}.", GRAMMAR) from None
    except errors.GrammarInvalid as error:
        raise InvalidGrammar(f"{_sentence(error)}.", GRAMMAR) from None
    except NoGrammarProcess as error:
        raise GrammarsUnavailable(f"{_sentence(error)}.", GRAMMAR, retry_after=RETRY_SECONDS) from None
    except TooManyGrammars as error:
        raise GrammarsExceeded(f"{_sentence(error)}.", GRAMMAR, retry_after=RETRY_SECONDS) from None
    return _Held(compiler, compiled, key)


class _Held:
    """A compiled grammar that a request needs until this is called."""

    def __init__(self, compiler: GrammarCompiler, compiled: CompiledGrammar, key: str) -> None:
        self._compiler, self._key = compiler, key
        self._compiled: CompiledGrammar | None = compiled

    def __call__(self) -> None:
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            self._compiler.release(compiled, self._key)


def _sentence(error: Exception) -> str:
    text = str(error).rstrip(".")
    return text[:1].upper() + text[1:]
