"""A device on paper: executes batches on a dictionary of KV slots, and checks that every context reads back intact."""

from collections import deque
from collections.abc import Iterable, Iterator

from backend.config import EngineConfig
from backend.scheduler.batch import Batch, PromptLogprobs, StepOutput, TokenLogprobs


def next_token(tokens: list[int]) -> int:
    """A deterministic 'model': the next token depends on the whole context, so a corrupted one shows."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % 50


def logprobs_of(token: int) -> TokenLogprobs:
    """Log probabilities that tell which token they are of."""
    return TokenLogprobs(-float(token), 1, [token], [-float(token)])


class PaperDevice:
    """Runs each batch when told to, in order. Keeps what a real device keeps: block tables, last tokens, KV slots.

    Copies of a batch that is launched first may run as soon as that, beside the steps before it: when `copy` is called,
    or else when the batch is executed.
    """

    def __init__(self, block_size: int, config: EngineConfig | None = None, model: int = 0) -> None:
        """`config`: of an engine whose layers with a window, of the model of this number, have blocks of their own."""
        self.block_size = block_size
        self.config = config if config is not None and config.windows_of(model)[0] else None
        self.model = model
        self.windows: dict[int, dict[int, list[int]]] = {}  # per slot, by place in its table: a block of each group
        self.tables: dict[int, list[int]] = {}
        self.known: dict[int, list[int]] = {}  # per slot: every token so far, sampled ones too
        self.prompt_lengths: dict[int, int] = {}
        # KV slot: (position, token), of a window (position, token, group), of an adapter (-number, index)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.adapters: dict[int, tuple[int, list[int]] | None] = {}  # per slot: its number and blocks
        self.host: dict[int, list[tuple[int, ...] | None]] = {}  # host block: what was copied to it
        self._launched: list[Batch] = []  # and not executed yet
        self._copies: deque[tuple[Batch, bool, int, int]] = (
            deque()
        )  # of theirs: whether to the host, from where to where

    def launch(self, batch: Batch) -> None:
        self._launched.append(batch)
        self._copies += [(batch, True, block, host_block) for block, host_block in batch.swap_out]
        self._copies += [(batch, False, host_block, block) for host_block, block in batch.swap_in]

    def copy(self, count: int) -> None:
        """Run the next `count` copies, if there are as many."""
        for _ in range(min(count, len(self._copies))):
            _, is_out, source, target = self._copies.popleft()
            self._copy_out(source, target) if is_out else self._copy_in(source, target)

    def forced(self, batch: Batch, count: int) -> dict[int, list[int]]:
        """Return tokens that can only follow those that a batch has sampled, for every other of its rows."""
        found = {}
        for index, slot in list(enumerate(batch.sampled_slots))[count % 2 :: 2]:
            tokens = list(self.known[slot])
            for _ in range(count):
                tokens.append(next_token(tokens))
            found[index] = tokens[len(self.known[slot]) :]
        return found

    def lose(self, copied: int) -> None:
        """Lose what was launched, though some of its copies were made."""
        self.copy(copied)
        self._copies.clear()
        self._launched.clear()

    def execute(self, batch: Batch) -> StepOutput:
        if not any(batch is one for one in self._launched):
            self.launch(batch)
        self._launched = [one for one in self._launched if one is not batch]
        self.copy(sum(one is batch for one, *_ in self._copies))
        for number, index, block in batch.adapter_blocks:
            self.memory.update(dict.fromkeys(self._addresses(block), (-number, index)))
        for admitted in batch.admitted:
            self.adapters[admitted.slot] = admitted.adapter
            self.tables[admitted.slot] = []
            self.windows[admitted.slot] = {}
            self.known[admitted.slot] = list(admitted.token_ids)
            self.prompt_lengths[admitted.slot] = admitted.num_prompt_tokens
        self._change_tables(batch)
        assert len(set(batch.slots)) == len(batch.slots), "a slot appears twice in one step"
        cursor, drafts = 0, {batch.sampled[index]: draft for index, draft in batch.drafts}
        for row, (slot, start, whole) in enumerate(zip(batch.slots, batch.starts, batch.lengths, strict=True)):
            length = whole - len(drafts.get(row, ()))
            if row < batch.num_decodes:
                assert length == 1
                assert start == len(self.known[slot]) - 1, "a decode feeds the token sampled last"
                self._compute(slot, start, self.known[slot][start:])
            else:
                self._compute(slot, start, batch.token_ids[cursor : cursor + length])
                cursor += whole
        assert cursor == len(batch.token_ids)
        self._check_adapters(batch.slots)
        for block, other in batch.block_copies:
            for source, address in zip(self._addresses(block), self._addresses(other), strict=True):
                self.memory.pop(address, None)
                if source in self.memory:
                    self.memory[address] = self.memory[source]
        ends = [batch.starts[row] + batch.lengths[row] - len(drafts.get(row, ())) for row in batch.sampled]
        assert len(set(batch.sampled_slots)) == len(ends), "a slot samples twice in one step"
        sampled = [self._sample(slot, end) for slot, end in zip(batch.sampled_slots, ends, strict=True)]
        logprobs = {index: logprobs_of(token) for index, token in enumerate(sampled)}
        output = StepOutput(batch.step, sampled, 0.0, logprobs, [*self._scored(batch)])
        if batch.drafts:
            slots = batch.sampled_slots
            output.forced = {index: self._verify(slots[index], draft) for index, draft in batch.drafts}
            output.forced_logprobs = {index: list(map(logprobs_of, one)) for index, one in output.forced.items()}
        return output

    def _verify(self, slot: int, draft: list[int]) -> list[int]:
        """Compute drafted tokens, and sample behind each that was sampled in its place; returns those tokens."""
        first, behind, accepts = len(self.known[slot]) - 1, list[int](), True
        for position, token in enumerate(draft, first):
            accepts = accepts and token == self.known[slot][position]
            if accepts:
                self._compute(slot, position, [token])
                behind.append(self._sample(slot, position + 1))
            else:
                self.memory[self._address(slot, position)] = (position, -1 - token)
        return behind

    def _change_tables(self, batch: Batch) -> None:
        for slot, index, blocks in batch.new_blocks:
            table = self.tables[slot]
            assert index <= len(table), "blocks arrive out of order"
            known = table[index : index + len(blocks)]
            assert known == blocks[: len(known)], "a block is another than it was"
            table[index : index + len(blocks)] = blocks
        for slot, first, blocks in batch.window_blocks:
            assert self.config is not None
            groups = self.config.windows_of(self.model)[0]
            for index in range(0, len(blocks), groups):
                self.windows[slot][first + index // groups] = blocks[index : index + groups]

    def _check_adapters(self, slots: Iterable[int]) -> None:
        for number, blocks in filter(None, map(self.adapters.get, slots)):
            for index, block in enumerate(blocks):
                held = {self.memory.get(address) for address in self._addresses(block)}
                assert held == {(-number, index)}, f"the adapter {number} was overwritten"

    def _scored(self, batch: Batch) -> Iterator[PromptLogprobs]:
        for slot, start, length in zip(batch.slots, batch.starts, batch.lengths, strict=True):
            tokens = self.known[slot][start + 1 : min(start + length + 1, self.prompt_lengths[slot])]
            if tokens:
                yield PromptLogprobs(slot, start + 1, [logprobs_of(token) for token in tokens])

    def _copy_out(self, block: int, host_block: int) -> None:
        content = [self.memory.get(address) for address in self._addresses(block)]
        assert None not in content, "a block was swapped out that is not whole"
        self.host[host_block] = content

    def _copy_in(self, host_block: int, block: int) -> None:
        for address, token in zip(self._addresses(block), self.host[host_block], strict=True):
            assert token is not None
            self.memory[address] = token

    def _addresses(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def poison(self, blocks: Iterable[int]) -> None:
        """Lose what is in these blocks: nobody has them."""
        for block in blocks:
            for address in self._addresses(block):
                self.memory.pop(address, None)

    def _compute(self, slot: int, start: int, token_ids: list[int]) -> None:
        self._check_window(slot, start)
        for position, token in enumerate(token_ids, start):
            if position == len(self.known[slot]):  # it was forced, and not sampled
                self.known[slot].append(next_token(self.known[slot]))
            true = self.known[slot][position]
            assert token == true, f"slot {slot} was given {token} at {position}, expected {true}"
            self.memory[self._address(slot, position)] = (position, true)
            for group, address in enumerate(self._window_addresses(slot, position)):
                self.memory[address] = position, true, group

    def _check_window(self, slot: int, start: int) -> None:
        """What a row of this slot reads of its window, before its first token, is whole."""
        if self.config is not None:
            for position in range(self.config.first_seen(start, self.model) * self.block_size, start):
                true = self.known[slot][position]
                for group, address in enumerate(self._window_addresses(slot, position)):
                    assert self.memory.get(address) == (position, true, group), f"slot {slot} lost its window"

    def _window_addresses(self, slot: int, position: int) -> list[int]:
        place, offset = divmod(position, self.block_size)
        blocks = () if self.config is None else self.windows[slot][place]
        return [block * self.block_size + offset for block in blocks]

    def _sample(self, slot: int, end: int) -> int:
        assert end == len(self.known[slot]), "sampled before its context was complete"
        context = [self.memory[self._address(slot, position)] for position in range(end)]
        assert context == list(enumerate(self.known[slot])), f"the KV memory of slot {slot} was overwritten"
        token = next_token(self.known[slot])
        self.known[slot].append(token)
        return token

    def _address(self, slot: int, position: int) -> int:
        return self.tables[slot][position // self.block_size] * self.block_size + position % self.block_size


class PaperDevices:
    """One device with several models: each knows its own sequences, and all have one memory."""

    def __init__(self, block_size: int, count: int, config: EngineConfig | None = None) -> None:
        self.each = [PaperDevice(block_size, config, model) for model in range(count)]
        first = self.each[0]
        for device in self.each:
            device.memory, device.host, device._copies = first.memory, first.host, first._copies
        self.copy, self.poison = first.copy, first.poison

    def launch(self, batch: Batch) -> None:
        self.each[batch.model].launch(batch)

    def forced(self, batch: Batch, count: int) -> dict[int, list[int]]:
        return self.each[batch.model].forced(batch, count)

    def lose(self, copied: int) -> None:
        self.copy(copied)
        for device in self.each:
            device.lose(0)

    def execute(self, batch: Batch) -> StepOutput:
        return self.each[batch.model].execute(batch)


def continuation(prompt: list[int], length: int, end_token: int) -> list[int]:
    """What the device must generate for a prompt, alone or in any batch."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + length:
        tokens.append(next_token(tokens))
        if tokens[-1] == end_token:
            break
    return tokens[len(prompt) :]
