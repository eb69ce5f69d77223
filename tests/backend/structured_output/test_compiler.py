"""Compiling for owners: what it may take, what is kept for whom, and what is given up."""

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest

from backend.errors import GrammarInvalid, GrammarTooComplex
from backend.grammar import Grammar, GrammarKind
from backend.structured_output import compiler as module
from backend.structured_output.compiler import MAX_WAITING_PER_KEY, CompiledGrammar, GrammarCompiler, TooManyGrammars
from backend.structured_output.grammar_process import COMPILE_NICENESS
from backend.structured_output.processes import ForkedProcess, GrammarProcesses, MatchingProcess, NoGrammarProcess
from tests.backend.structured_output.grammars import PERSON, branching, crossing, regex, running_processes, schema
from tests.gateway.server_process import eventually

HARD = schema(branching(12))


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    with running_processes(compile_seconds=0.1) as running:
        yield running


@pytest.fixture
def compiler(processes: GrammarProcesses) -> GrammarCompiler:
    return GrammarCompiler(processes)


def test_the_matching_process_is_started_before_the_first_request() -> None:
    with running_processes() as processes:
        compiler = GrammarCompiler(processes)
        compiler.prepare()
        compiler._threads.shutdown()
        assert processes._matching != [None]


def test_a_gateway_says_at_its_start_that_no_answer_can_have_a_grammar(caplog: pytest.LogCaptureFixture) -> None:
    processes = Mock(matching=Mock(side_effect=GrammarInvalid("its process does not start")))
    compiler = GrammarCompiler(processes)
    compiler.prepare()
    compiler._threads.shutdown()
    assert "no answer can have a grammar: its process does not start" in caplog.text


def test_all_processes_come_back_where_the_one_that_forks_them_was_killed() -> None:
    with running_processes() as processes:
        compiler = GrammarCompiler(processes)
        compiler.compile_now(PERSON)
        assert processes._process is not None
        processes._process.kill()
        processes._process.wait()
        for pattern in ("[a-z]+", "[0-9]+"):
            assert processes.has(compiler.compile_now(regex(pattern)).process)


def test_no_vocabulary_is_loaded_again_where_the_process_that_forks_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of all rows would wait for it."""
    with running_processes() as processes:
        compiler = GrammarCompiler(processes)
        process = compiler.compile_now(PERSON).process
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", Mock(side_effect=AssertionError("it is started again")))
            for pattern in ("[a-z]+", "[0-9]+", "[0-9a-z]+"):
                kill(_parent_of(process))
                process = compiler.compile_now(regex(pattern)).process
                assert processes.has(process)
        assert processes._reserve is not None
        kill(_parent_of(process))
        processes._reserve.link.close()  # it ends too
        assert processes.has(compiler.compile_now(regex("[A-Z]+")).process)


def test_a_stand_in_that_hangs_is_ended_with_all_processes() -> None:
    with running_processes() as processes:
        compiler = GrammarCompiler(processes)
        kill(_parent_of(compiler.compile_now(PERSON).process))
        stand_in = _parent_of(compiler.compile_now(regex("[a-z]+")).process)
        ended = os.pidfd_open(stand_in)
        os.kill(stand_in, signal.SIGSTOP)
    select.select([ended], [], [])
    os.close(ended)


def _parent_of(process: ForkedProcess) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("PPid:")[1].split()[0])


def kill(pid: int) -> None:
    """Kill a process, and wait until it is dead: its parent may leave it unreaped."""
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)


def test_a_process_that_was_killed_while_it_waited_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile_now(regex("[u-w]+", "killed"))
    (process,) = compiler._spare
    process.kill()
    process.links[0].settimeout(240)
    assert not process.links[0].recv(1)
    assert compiler.compile_now(regex("[x-z]+", "killed")).num_users == 1


def test_a_compiled_grammar_is_cached_for_its_owner_alone(compiler: GrammarCompiler) -> None:
    charged: list[tuple[str, float]] = []
    compiler.on_compiled.append(lambda owner, seconds: charged.append((owner, seconds)))
    first = compiler.compile_now(regex("[a-z]+", "a"))
    assert compiler.compile_now(regex("[a-z]+", "a")) is first
    assert compiler.compile_now(regex("[a-z]+", "b")) is not first
    assert (compiler.num_misses, compiler.num_hits) == (2, 1)
    assert [owner for owner, _ in charged] == ["a", "b"]
    assert all(seconds > 0 for _, seconds in charged)
    assert first.num_bytes > 0


def test_a_grammar_that_takes_too_long_is_refused_with_the_limit_and_harms_no_other(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarTooComplex, match="more than 100 ms of a processor"):
        compiler.compile_now(HARD)
    assert compiler.compile_now(PERSON).num_users == 1
    assert (compiler.num_too_complex, compiler.num_invalid) == (1, 0)


def test_a_grammar_that_takes_too_much_memory_is_refused_with_the_limit() -> None:
    with running_processes(compile_seconds=60, compile_bytes=12 << 20) as processes:
        compiler = GrammarCompiler(processes)
        with pytest.raises(GrammarTooComplex, match="more than 12 MiB of memory"):
            compiler.compile_now(schema({"enum": [f"value {n} {'x' * 100}" for n in range(30_000)]}))
        assert compiler.compile_now(PERSON).num_users == 1


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "given no time"])
def test_processes_that_end_or_hang_for_reasons_of_their_own_are_not_held_against_a_grammar(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_WALL_SECONDS", 0.1 if is_stopped else 20.0)
    with running_processes() as processes:
        compiler, fork = GrammarCompiler(processes), processes.fork_compiler

        def forked() -> ForkedProcess:
            process = fork()
            os.kill(process.pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
            return process

        monkeypatch.setattr(processes, "fork_compiler", forked)
        with pytest.raises(NoGrammarProcess, match="do not answer"):
            compiler.compile_now(PERSON)
        assert (compiler.num_too_complex, compiler.num_invalid) == (0, 0)
        monkeypatch.undo()
        compiler.compile_now(PERSON)


def test_a_process_that_compiles_leaves_the_processors_to_those_that_generate() -> None:
    with running_processes() as processes:
        process = processes.fork_compiler()
        nice = min(19, os.nice(0) + COMPILE_NICENESS)
        eventually(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == nice)
        eventually(lambda: os.sched_getscheduler(process.pid) == os.SCHED_BATCH)


def test_a_grammar_that_is_none_is_refused_with_what_is_wrong(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarInvalid, match="unclosed group") as refused:
        compiler.compile_now(regex("(a"))
    assert not isinstance(refused.value, GrammarTooComplex)


@pytest.mark.parametrize("grammar", [regex("\ud800"), Grammar(GrammarKind.CHOICE, "red")])
def test_a_source_that_cannot_be_read_is_no_matter_of_memory(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(GrammarInvalid) as refused:
        compiler.compile_now(grammar)
    assert not isinstance(refused.value, GrammarTooComplex)


def test_a_matching_process_ends_with_its_compiling_thread(compiler: GrammarCompiler) -> None:
    """Who waits for the thread would wait for ever, and with it every tenant's grammars."""
    process = compiler.compile_now(PERSON).process
    process._grammars.settimeout(60)
    with pytest.raises(EOFError):
        process.compile(Grammar(GrammarKind.CHOICE, "red"))
    assert compiler.compile_now(regex("[a-e]+")).num_users == 1


def test_a_matching_process_that_does_not_answer_keeps_no_grammar_waiting(compiler: GrammarCompiler) -> None:
    stopped = compiler.compile_now(PERSON).process
    assert stopped._grammars.gettimeout() is not None, "or every tenant's grammars would wait for ever"
    stopped._grammars.settimeout(0.1)
    os.kill(stopped.pid, signal.SIGSTOP)
    compiled = compiler.compile_now(regex("[a-e]+", "waits for another"))
    assert compiled.process is not stopped
    assert compiler.processes.has(compiled.process)


def test_a_grammar_beyond_a_limit_of_the_library_is_told_apart_from_one_that_is_none(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(GrammarTooComplex, match="too large"):
        compiler.compile_now(schema(crossing(16)))


def test_a_tokenizer_that_is_of_no_use_is_told(tmp_path: object) -> None:
    with running_processes() as processes:
        object.__setattr__(processes.setup, "tokenizer_path", f"{tmp_path}/none.json")
        with pytest.raises(GrammarInvalid, match=r"answers of this model cannot be constrained: .*none.json"):
            GrammarCompiler(processes).compile_now(PERSON)


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have no memory for it at present."""
    with running_processes() as processes:
        compiler = GrammarCompiler(processes)
        with monkeypatch.context() as patched:
            patched.setattr("backend.structured_output.processes.module_command", lambda *_: ["false"])
            with pytest.raises(NoGrammarProcess, match="no grammar process can be started"):
                compiler.compile_now(PERSON)
            patched.setattr("backend.structured_output.processes.module_command", lambda *_: ["/nowhere"])
            with pytest.raises(NoGrammarProcess, match="No such file"):
                compiler.compile_now(PERSON)
        assert compiler.compile_now(PERSON).num_users == 1


def test_an_owners_bytes_are_bounded_and_what_was_not_used_for_longest_goes_first(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = processes.matching(0)
    monkeypatch.setattr(module._Compilation, "run", lambda job: CompiledGrammar(job._grammar, 100, 0.01, process))
    compiler = GrammarCompiler(processes, owner_bytes=250)
    first, second = (compiler.compile_now(regex(source)) for source in ("b+", "c+"))
    with pytest.raises(TooManyGrammars, match="take more than"):
        compiler.compile_now(regex("d+"))
    compiler.release(first)
    compiler.compile_now(regex("d+"))
    assert compiler.compile_now(regex("c+")) is second
    assert compiler.compile_now(regex("z+", "another")).num_users == 1
    with pytest.raises(TooManyGrammars):
        compiler.compile_now(regex("b+"))


async def test_grammars_in_use_by_one_key_leave_half_of_the_bytes_to_its_owners_other_keys(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = processes.matching(0)
    monkeypatch.setattr(module._Compilation, "run", lambda job: CompiledGrammar(job._grammar, 100, 0.01, process))
    compiler = GrammarCompiler(processes, owner_bytes=250)
    large = [await compiler.acquire(regex(source, "a"), "greedy") for source in ("b+", "c+")]
    with pytest.raises(TooManyGrammars):
        await compiler.acquire(regex("d+", "a"), "greedy")
    small = await compiler.acquire(regex("e+", "a"), "modest")
    with pytest.raises(TooManyGrammars):
        await compiler.acquire(regex("f+", "a"), "modest")
    compiler.release(small, "modest")
    for one in large:
        compiler.release(one, "greedy")
    assert not compiler._used and not compiler._waiting


async def test_keys_of_an_owner_take_turns_at_being_compiled_for(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, order = processes.matching(0), list[str]()

    def run_job(job: module._Compilation) -> CompiledGrammar:
        order.append(job._grammar.source)
        return CompiledGrammar(job._grammar, 1, 0.01, process)

    monkeypatch.setattr(module._Compilation, "run", run_job)
    compiler = GrammarCompiler(processes)
    flood = [compiler.acquire(regex(f"a{{{n}}}", "a"), "greedy") for n in range(1, MAX_WAITING_PER_KEY + 2)]
    await asyncio.gather(*flood, compiler.acquire(regex("b", "a"), "modest"))
    assert order.index("b") <= 2
    assert not compiler._waiting and not compiler._turns


def test_grammars_are_compiled_again_when_their_process_has_ended(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile_now(PERSON)
    compiler.processes.discard(compiled.process)
    assert compiler.compile_now(PERSON) is compiled
    assert compiled.num_users == 2
    assert (compiler.num_hits, compiler.num_misses) == (0, 2)


async def test_an_owner_has_one_compiled_at_a_time_and_a_bound_of_waiting_ones(compiler: GrammarCompiler) -> None:
    asked = [compiler.acquire(regex(f"a{{{n}}}", "a")) for n in range(1, MAX_WAITING_PER_KEY + 4)]
    *own, beside = await asyncio.gather(*asked, compiler.acquire(regex("a", "b")), return_exceptions=True)
    kinds = [type(one) for one in own]
    assert kinds == [CompiledGrammar] * (MAX_WAITING_PER_KEY + 1) + [TooManyGrammars] * 2
    assert isinstance(beside, CompiledGrammar)


async def test_the_same_grammar_asked_for_at_once_is_compiled_once(compiler: GrammarCompiler) -> None:
    found = await asyncio.gather(*[compiler.acquire(PERSON) for _ in range(5)])
    assert len({id(compiled) for compiled in found}) == 1
    assert compiler.num_misses == 1


async def test_compiling_is_given_up_when_nobody_waits_for_it_any_more() -> None:
    with running_processes(compile_seconds=60) as processes:
        compiler = GrammarCompiler(processes)
        waiting = asyncio.create_task(compiler.acquire(HARD))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await compiler.acquire(PERSON)).num_users == 1


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_an_owner_is_charged_for_a_compilation_that_it_gave_up() -> None:
    with running_processes(compile_seconds=60) as processes:
        compiler = GrammarCompiler(processes)
        charged: list[tuple[str, float]] = []
        compiler.on_compiled.append(lambda owner, seconds: charged.append((owner, seconds)))
        waiting = asyncio.create_task(compiler.acquire(schema(branching(12), "a")))
        await until(lambda: any(one.cpu_seconds() > 0.05 for one in processes._compiling))
        waiting.cancel()
        await until(lambda: charged)
        ((owner, seconds),) = charged
        assert owner == "a" and 0 < seconds < 60


async def test_a_grammar_compiled_after_its_client_left_is_charged_and_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, compile_there = Event(), Event(), MatchingProcess.compile

    def compile_later(process: MatchingProcess, grammar: Grammar) -> None:
        began.set()
        go_on.wait()
        compile_there(process, grammar)

    monkeypatch.setattr(MatchingProcess, "compile", compile_later)
    charged: list[str] = []
    compiler.on_compiled.append(lambda owner, _: charged.append(owner))
    waiting = asyncio.create_task(compiler.acquire(regex("[a-f]+", "a")))
    await asyncio.to_thread(began.wait)
    waiting.cancel()
    go_on.set()
    await until(lambda: charged)
    assert charged == ["a"]
    assert compiler.compile_now(regex("[a-f]+", "a")).num_users == 1
    assert (compiler.num_hits, compiler.num_misses) == (1, 1)


@pytest.mark.parametrize("failure", [TimeoutError, KeyboardInterrupt])
def test_the_forking_process_is_restarted_when_it_does_not_tell_in_time_how_a_fork_ended(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """What it says later would be taken for its answer to the next question."""
    process, processes = compiler.compile_now(PERSON).process, compiler.processes
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr("backend.structured_output.processes.receive_frame", Mock(side_effect=failure))
        assert processes.discard(process) is None
    assert processes._link is None
    assert processes.has(compiler.compile_now(PERSON).process)


def test_names_of_grammars_differ_by_kind_source_and_owner() -> None:
    grammars = [regex("a"), schema("a"), regex("a", "b"), Grammar(regex("a").kind, "b"), regex("ab")]
    assert len({grammar.hash for grammar in grammars}) == len(grammars)
