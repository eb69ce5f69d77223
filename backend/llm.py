"""Offline use: a list of prompts in, a list of texts out, on the server's scheduler, kernels and sampler."""

import json
import random
import secrets
import sys
import time
from collections import abc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

from backend.adapter import Adapter
from backend.adapter_registry import AdapterRegistry
from backend.config import EngineOptions
from backend.errors import DeviceError, InvalidRequest
from backend.loader import LoadedModel, load_model
from backend.paged_kv.block_names import adapter_salt
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.forking import group_by_prompt
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.step_loop import StepLoop
from backend.structured_output.compiler import CompiledGrammar, GrammarCompiler
from backend.text.detokenizer import IncrementalDetokenizer
from backend.worker.executor import Executor, InlineDevice

GRAMMAR_BYTES = 1 << 30  # of compiled grammars, besides the ones in use

Prompt = str | abc.Sequence[int] | abc.Sequence[abc.Mapping[str, str]]
"""A prompt is a text, token ids, or chat messages ({"role": ..., "content": ...})."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length", "grammar"]  # "grammar": it allows no further token
    num_cached_tokens: int = field(default=0, compare=False)  # of the prompt, found in the prefix cache or forked
    logprobs: list[TokenLogprobs] | None = None  # of each of `token_ids`, if they were asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt from its second token on


class LLM:
    """A model that continues prompts in batches. A common beginning of prompts is computed once, in this call and in
    later ones, while it stays cached; a prompt given several times in a call has all its answers from one prefill.

    >>> llm = LLM("embedded")
    >>> llm.generate([[{"role": "user", "content": "Count from 3 to 6."}]])[0].text
    '3, 4, 5, 6'
    """

    def __init__(
        self,
        model: str = "embedded",
        options: EngineOptions | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kernels: str = "auto",
        tensor_parallel: int = 1,
        seed: int = 0,
    ) -> None:
        """Load `model`, a name or directory as for `sluice serve`. Raises `ModelLoadError` or `ConfigError`."""
        engine_options = options or EngineOptions()
        loaded = load_model(
            model, engine_options, dtype=dtype, device=device, kernels=kernels, tensor_parallel=tensor_parallel
        )
        loaded.runner.warm_up()
        self._set_up(loaded, loaded.runner, seed)

    @classmethod
    def of(cls, model: LoadedModel, executor: Executor, seed: int = 0) -> Self:
        """Make an LLM over a loaded model, on an executor of the caller's choice.

        The LLM owns the memory of keys and values from now on, and relies on finding its own blocks there.
        """
        llm = cls.__new__(cls)
        llm._set_up(model, executor, seed)
        return llm

    def _set_up(self, model: LoadedModel, executor: Executor, seed: int) -> None:
        self.model = model
        self._executor = executor
        self._seeds = random.Random(seed)
        self._compiler: GrammarCompiler | None = None
        self.adapters = AdapterRegistry([model])
        self._begin()

    def _begin(self) -> None:
        """Begin with no sequence waiting and no step in flight."""
        config = replace(self.model.engine_config, max_preemptions=sys.maxsize)  # no sequence is given up for others
        if not self._executor.runs_ahead:
            config = replace(config, steps_in_flight=1)  # a step planned behind another would only know less of it
        self.scheduler = Scheduler(config, FirstComeFirstServed())
        self._engine = OfflineEngine(self.scheduler, self._executor)
        self._names = self.model.block_names(secrets.token_bytes(32))
        self.scheduler.name_blocks_by(self._names)
        self._num_calls = 0

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter as PEFT saves it, for `generate` to name. Raises `ModelLoadError`, and `ConfigError` where
        the option `max_adapter_rank` is 0.
        """
        self.adapters.add(name, Path(path), self.adapters.read(Path(path)))

    def generate(
        self,
        prompts: abc.Sequence[Prompt],
        sampling: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        progress: bool = True,
        detokenize: bool = True,
        adapters: abc.Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt; completions come in the order of the prompts. `adapters` names one for each prompt,
        None for the model alone.

        `sampling` is shared, or one for each prompt; None is greedy until the model ends its text. Without `detokenize`
        completions have token ids and an empty text. Raises `InvalidRequest` before anything runs when a prompt does
        not fit or is none, or a stop string has no text to be found in. An interrupted call loses its completions, and
        the next call works as usual.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts is one text; a list of prompts is expected", "prompts")
        each = self._sampling(sampling, len(prompts))
        if not detokenize and any(one.stop for one in each):
            raise InvalidRequest("stop strings are looked for in text, and detokenize is False", "stop")
        adapted = self._adapters(adapters, len(prompts))
        given = enumerate(zip(prompts, each, adapted, strict=True))
        texts = [self._text(index, *one, detokenize) for index, one in given]
        release = self._compile_grammars(each)
        by_sequence = {text.sequence: text for text in texts}
        group_by_prompt(by_sequence)
        self._name(by_sequence)
        try:
            for text in texts:
                self.scheduler.add(text.sequence)
            with _bar(len(texts), progress) as bar:
                self._run(lambda delta: bar.update(by_sequence[delta[0]].add_token(delta, self.scheduler)))
        except BaseException:
            self._begin()
            raise
        finally:
            release()
        return [text.completion() for text in texts]

    def _compile_grammars(self, each: list[SamplingParams]) -> Callable[[], object]:
        """Have all grammars compiled, and return the function that releases them. Raises `GrammarInvalid`."""
        grammars = {one.grammar: None for one in each if one.grammar is not None}
        if not grammars:
            return bool
        if self._compiler is None:
            masks = self.model.runner.masks
            if masks is None:
                raise InvalidRequest("answers of this model cannot be constrained: it has no end token", "grammar")
            self._compiler = GrammarCompiler(masks.processes, GRAMMAR_BYTES)
        compiled: list[CompiledGrammar] = []
        release = partial(self._compiler.release_all, compiled)
        try:
            compiled.extend(map(self._compiler.compile_now, grammars))
        except BaseException:
            release()
            raise
        return release

    def step(self) -> list[NewToken]:
        """Return the tokens of the oldest step in flight; the steps that follow it are planned and launched first."""
        return self._engine.step()

    def _run(self, on_delta: Callable[[NewToken], object]) -> None:
        while self.scheduler.has_work:
            for delta in self.step():
                on_delta(delta)

    @staticmethod
    def _sampling(sampling: SamplingParams | abc.Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None:
            sampling = SamplingParams(temperature=0)
        if isinstance(sampling, SamplingParams):
            return [sampling] * count
        if len(sampling) != count:
            raise InvalidRequest(f"{len(sampling)} sampling parameters were given for {count} prompts", "sampling")
        return list(sampling)

    def _adapters(self, names: abc.Sequence[str | None] | None, num_prompts: int) -> list[Adapter | None]:
        if names is None:
            return [None] * num_prompts
        if len(names) != num_prompts:
            raise InvalidRequest(f"{len(names)} adapters were given for {num_prompts} prompts", "adapters")
        for name in names:
            if name is not None and name not in self.adapters.loaded:
                raise InvalidRequest(f"the adapter {name!r:.200} is not loaded: call load_adapter", "adapters")
        return [None if name is None else self.adapters.get(name) for name in names]

    def _text(
        self, index: int, prompt: Prompt, sampling: SamplingParams, adapter: Adapter | None, detokenize: bool
    ) -> "_GrowingCompletion":
        token_ids = self._encode(index, prompt)
        self._check_in_vocabulary(f"prompt {index}", token_ids, "prompts")
        self._check_in_vocabulary("stop_token_ids", sampling.stop_token_ids, "stop_token_ids")
        most = self.model.engine_config.max_model_len - len(token_ids)
        if not token_ids or most < (sampling.max_tokens or 1):
            raise InvalidRequest(
                f"prompt {index} has {len(token_ids)} tokens and max_tokens is {sampling.max_tokens}; a prompt needs "
                f"at least 1, and the two at most {self.model.engine_config.max_model_len}",
                "prompts",
            )
        ends = frozenset(sampling.stop_token_ids)
        request = PromptRequest(
            id=str(index),
            tenant="",
            prompt=token_ids,
            sampling=sampling,
            max_tokens=sampling.max_tokens or most,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            end_tokens=ends if sampling.ignore_eos else ends | self.model.end_tokens,
            adapter=adapter,
        )
        sequence = Sequence(request, arrival=float(index))
        if not detokenize:
            return _GrowingCompletion(sequence, None)
        tail = () if _is_chat(prompt) else token_ids
        detokenizer = IncrementalDetokenizer(
            self.model.tokenizer,
            sampling.stop,
            prompt_tail=tail,
            min_tokens=sampling.min_tokens,
            keeps_spaces=sampling.grammar is not None,
        )
        return _GrowingCompletion(sequence, detokenizer)

    def _name(self, sequences: abc.Iterable[Sequence]) -> None:
        """Name the blocks of prompts, by which the cache finds them. A prompt whose log probabilities are asked for is
        computed again: only the answers to it share its blocks.
        """
        if not self.scheduler.config.shares_blocks:
            return
        self._num_calls += 1
        for sequence in sequences:
            asks = sequence.prompt_logprobs is not None
            salt = (str(self._num_calls), sequence.prompt_group or sequence.id) if asks else ()
            digest = None if (adapter := sequence.request.adapter) is None else adapter.digest
            sequence.cache_root = self._names.root(*salt, *adapter_salt(digest))
            self._names.name(sequence, sequence.num_prompt_tokens // self.scheduler.config.block_size)

    def _check_in_vocabulary(self, what: str, token_ids: abc.Sequence[int], param: str) -> None:
        size = self.model.config.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise InvalidRequest(
                    f"{what} must hold token ids between 0 and {size - 1}, got {token_id!r:.40}", param
                )

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode_text(prompt, add_special_tokens=True)
        if not isinstance(prompt, abc.Sequence):
            expected = "a text, a list of token ids or a list of messages"
            raise InvalidRequest(
                f"prompt {index} is of type {type(prompt).__name__}; {expected} is expected", "prompts"
            )
        if _is_chat(prompt):
            try:
                json.dumps(prompt, ensure_ascii=False, default=str).encode()
            except UnicodeEncodeError:
                raise InvalidRequest(
                    f"prompt {index} is not valid Unicode: it holds a lone surrogate", "prompts"
                ) from None
            return tokenizer.encode_text(tokenizer.render_chat(prompt), add_special_tokens=False)  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]


class OfflineEngine:
    """An engine for a program with one thread: the caller itself waits for the device."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._device = InlineDevice(executor)
        self._steps = StepLoop(scheduler, self._device.launch, time.perf_counter)

    def step(self) -> list[NewToken]:
        """Have the device finish its oldest step, once the steps that may follow it are launched; returns its tokens.

        Raises `DeviceError`: also when the model computed no numbers, and as `MemoryExhausted` when no step is small
        enough.
        """
        self._steps.schedule()
        while (seconds := self._steps.seconds_to_wake()) is not None:
            time.sleep(seconds)
            self._steps.schedule()
        new_tokens = self._steps.step(self._device.wait())
        if any(reason is FinishReason.FAILED for _, _, reason in new_tokens):
            raise DeviceError("the model computed no numbers to draw from: its weights or its dtype are at fault")
        return new_tokens


def _is_chat(prompt: Prompt) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], abc.Mapping)


def _bar(total: int, shown: bool) -> Any:
    """Return a progress bar, imported when it is shown: the engine itself does not need the package."""
    if not shown:
        return nullcontext(SimpleNamespace(update=bool))
    return import_module("tqdm").tqdm(total=total, desc="generating", unit="prompt")


class _GrowingCompletion:
    """The completion of one prompt while it grows."""

    def __init__(self, sequence: Sequence, detokenizer: IncrementalDetokenizer | None) -> None:
        self.sequence = sequence
        self._detokenizer = detokenizer  # None: only token ids are asked for
        self._pieces: list[str] = []
        self._token_ids: list[int] = []

    def add_token(self, delta: NewToken, scheduler: Scheduler) -> bool:
        """Add one token. Returns True if the text is complete."""
        _, token_id, reason = delta
        detokenizer = self._detokenizer
        if detokenizer is not None and detokenizer.stopped is not None:
            return False  # a step may bring several tokens, and an earlier one has ended the text
        if token_id >= 0:
            self._token_ids.append(token_id)
        if detokenizer is None:
            return reason is not None
        if token_id >= 0:
            self._pieces.append(detokenizer.push((token_id,)))
        if detokenizer.stopped is not None:
            scheduler.finish_sequence(self.sequence, FinishReason.STOP)
            return True
        if reason is not None:
            self._pieces.append(detokenizer.flush())
        return reason is not None

    def completion(self) -> Completion:
        at_string = self._detokenizer is not None and self._detokenizer.stopped is not None
        stopped = at_string or self.sequence.finish_reason is FinishReason.STOP
        unfinished: Literal["length", "grammar"] = "length"
        if self.sequence.finish_reason is FinishReason.GRAMMAR:
            unfinished = "grammar"
        return Completion(
            self.sequence.request.prompt,
            self._token_ids,
            "".join(self._pieces),
            "stop" if stopped else unfinished,
            self.sequence.num_cached_tokens,
            None if self.sequence.logprobs is None else self.sequence.logprobs[: len(self._token_ids)],
            self.sequence.prompt_logprobs,
        )
