"""Compiles the grammar of a request for its tenant, and translates the compiler's errors."""

from contextlib import ExitStack

from backend import errors
from backend.grammar import Grammar
from backend.structured_output.compiler import GrammarCompiler, TooManyGrammars
from backend.structured_output.processes import NoGrammarProcess
from gateway.errors import BadRequest
from gateway.grammar_errors import GrammarsExceeded, GrammarsUnavailable, InvalidGrammar, TooComplexGrammar

GRAMMAR = "grammar"  # field named in errors until the dialect replaces it by the client's
RETRY_SECONDS = 1.0


async def hold_grammar(compiler: GrammarCompiler | None, grammar: Grammar, key: str, held: ExitStack) -> None:
    """Have `held` keep the compiled grammar until it is closed. Raises `ApiError`."""
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
    held.callback(compiler.release, compiled, key)


def _sentence(error: Exception) -> str:
    text = str(error).rstrip(".")
    return text[:1].upper() + text[1:]
