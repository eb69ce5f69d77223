"""The limits of one API key of a tenant, as the store's scripts take them, and the scripts' answers. Pure."""

import dataclasses
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple
from urllib.parse import quote

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, QuotaRefused
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource, TokenPrices
from quotas.policy.policy import Outage
from quotas.reservation import NO_USAGE, Ask, LimitState, Reservation, Usage
from quotas.store.redis_link import number_word, word, words
from quotas.store.scripts import Script, Source

SHORT_STRING_BYTES = 32  # below it, a string's length shares its type byte
SMALL_INTEGER = 128  # below it, an integer is its type byte


def packed(values: Sequence[int | str]) -> bytes:
    """Pack an array of at most 65535 unsigned integers and strings of at most 65535 bytes as MessagePack."""
    return b"\xdc" + len(values).to_bytes(2) + b"".join(map(_packed, values))


def _packed(value: int | str) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(1) if value < SMALL_INTEGER else b"\xcf" + value.to_bytes(8)
    text = value.encode()
    head = bytes([0xA0 | len(text)]) if len(text) < SHORT_STRING_BYTES else b"\xda" + len(text).to_bytes(2)
    return head + text


PREFIX = "sluice"
RECORD = struct.Struct("<9d")
DOUBLE = struct.Struct("<d")
LETTERS = {
    Resource.REQUESTS: "r",
    Resource.INPUT_TOKENS: "i",
    Resource.OUTPUT_TOKENS: "o",
    Resource.TOKENS: "t",
    Resource.CONCURRENT_REQUESTS: "c",
}
BY_REQUEST = frozenset({Resource.REQUESTS, Resource.CONCURRENT_REQUESTS})
BY_TOKEN = frozenset({Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS, Resource.TOKENS})
MAX_PERIOD_DAYS = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 31}  # days
SPARE_SECONDS = 3600.0  # that state outlives its last effect
NO_KEY = "*"
NUM_ARGUMENTS = 10  # as lua/account.lua names them


def state_key(tenant: str) -> str:
    """Return the key of a tenant's state. One hash slot holds all of the tenant's keys, for any name."""
    return f"{PREFIX}:{{{quote(tenant, safe='', errors='surrogatepass')}}}"


def replica_field(replica: str) -> bytes:
    return f"p:{replica}".encode()


@dataclass(slots=True, eq=False)
class TrackedReservation:
    """A reservation at its replica: enough to restore it if the store loses it.

    state of a request              granted  used  is_local  is_offered  is_settle_sent  is_overdue
    reserve was sent                no       -     no        no          no              no
    runs, held by the store         yes      -     no        any         no              no
    ended, its settlement is sent   yes      set   no        any         yes             no
    ended, could not be settled     yes      set   no        any         any             yes
    runs by a slice or uncounted    no       -     yes       no          no              no
    the same, perhaps handed over   no       any   yes       yes         no              no
    """

    reservation: Reservation
    first_day: int = 0  # of the charge, counted from the Unix epoch
    last_day: int = 0  # of the newest extension on a later day; else as `first_day`
    last_day_output: int = 0  # tokens added on a later `last_day`
    booked: Usage = NO_USAGE
    granted: bool = False  # by the store
    used: Usage | None = None  # from its end on
    is_settle_sent: bool = False  # if the store lacks the reservation without a mark, that call has settled it
    is_overdue: bool = False  # the next heartbeat settles it
    outage: Outage = "closed"  # what to do while the store is away
    extensions: tuple[Reservation, ...] = ()  # made during an outage
    is_local: bool = False  # granted by this replica alone during an outage
    is_offered: bool = False  # a local one that the store may have taken over
    field: bytes = dataclasses.field(init=False)  # of the tenant's state

    def __post_init__(self) -> None:
        self.field = b"r:" + self.reservation.id.encode()

    def charged_again(self, day: int) -> None:
        self.first_day = self.last_day = day
        self.last_day_output = 0

    @property
    def progress(self) -> Usage:
        """The usage of the reservation without its extensions."""
        done = self.reservation.progress
        if not self.extensions:
            return done
        return done._replace(output_tokens=min(done.output_tokens, self.reservation.ask.output_tokens))

    @property
    def is_running(self) -> bool:
        return self.granted and self.used is None


class Levels(NamedTuple):
    """The used part of each limit, scaled, at a time in microseconds, and the generation of the store's state that
    answered.

    The numbers are unpacked from the answer's doubles on the first use.
    """

    generation: bytes
    doubles: bytes  # the time, then for each limit: used; in refusals and states set aside; in states lost

    @staticmethod
    def of(answer: list[bytes]) -> "Levels":
        _, generation, doubles = answer
        return Levels(generation, doubles)

    @staticmethod
    def at(now: int, generation: bytes, numbers: Sequence[int]) -> "Levels":
        return Levels(generation, struct.pack(f"<{1 + len(numbers)}d", now, *numbers))

    @property
    def now(self) -> int:
        return int(DOUBLE.unpack_from(self.doubles)[0])

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers after the time."""
        return tuple(map(int, struct.unpack_from(f"<{len(self.doubles) // 8 - 1}d", self.doubles, 8)))


class QuotaAccount:
    """The limits of a tenant and one of its keys, in the form that the scripts take: see lua/account.lua."""

    def __init__(self, tenant: str, key: str | None, limits: tuple[Limit, ...], replica: str, lease: float) -> None:
        """`limits` are all limits of its requests, the tenant's before the key's; `lease` is in seconds."""
        self.tenant = tenant
        self.key = key
        self.limits = limits
        self.scales = tuple(limit.window.seconds if isinstance(limit.window, Rate) else 1 for limit in self.limits)
        self.state = state_key(tenant).encode()
        self._rows = [
            (limit, limit.capacity * scale, scale, limit.amount if isinstance(limit.window, Rate) else 0)
            for limit, scale in zip(limits, self.scales, strict=True)
        ]
        self.scopes = tuple(scope for scope in _scopes(self.limits) if scope)
        self.keys = [self.state, *([self._key_levels] if any(limit.key for limit in self.limits) else [])]
        self.life = SPARE_SECONDS + max((_life(limit) for limit in self.limits), default=0.0)
        self._fewest_requests = _least(limit for limit in self.limits if limit.resource in BY_REQUEST)
        self._fewest_tokens = _least(limit for limit in self.limits if limit.resource in BY_TOKEN)
        self._limits_cost = any(limit.resource is Resource.COST for limit in self.limits)
        self.reservations: dict[str, TrackedReservation] = {}
        self.last_levels: Levels | None = None
        self.last_used = 0.0  # by the replica's clock
        columns = self._columns()
        self._spec = self._packed(columns[:4])
        self._spec_word = words(self._spec)
        self._constants = words(
            self._packed(columns), b"%d" % round(lease * 1e6), b"%d" % round(self.life * 1e3), replica_field(replica)
        )
        self._heads: dict[tuple[Script, int], bytes] = {}
        self._figures = struct.Struct(f"<{1 + len(limits)}d")  # the time, and the used part of each limit

    @property
    def generation(self) -> bytes:
        """The last seen generation of the tenant's state; empty without one."""
        return self.last_levels.generation if self.last_levels else b""

    def refuse_unfit(self, ask: Ask) -> None:
        """Raise `NeverFits` if a limit can never hold `ask`."""
        fits = ask.requests <= self._fewest_requests and ask.input_tokens + ask.output_tokens <= self._fewest_tokens
        if fits and not self._limits_cost:
            return
        for limit in self.limits:
            if (asked := ask.of(limit)) > limit.capacity:
                raise NeverFits(limit, asked)

    def command(self, script: Script, source: Source, ask: Ask, field: bytes, rest: Sequence[bytes] = ()) -> bytes:
        """Return the call, in RESP, of a script that begins as lua/account.lua says."""
        head = self._heads.get((script, len(rest)))
        if head is None:
            head = self._heads[script, len(rest)] = self._head(source, len(rest))
        asked = number_word(ask.requests), number_word(ask.input_tokens), number_word(ask.output_tokens)
        call = head + _known(self.generation) + word(field) + b"".join(asked) + self._spec_word
        return call + words(*rest) if rest else call

    def settlement(self, source: Source, field: bytes, used: Usage) -> bytes:
        """Return the call of lua/settle.lua, in RESP."""
        head = self._heads.get((Script.SETTLE, 0))
        if head is None:
            head = b"*10\r\n" + words(b"EVALSHA", source.digest, b"1", self.state)
            self._heads[Script.SETTLE, 0] = head
        counts = (used.requests, used.input_tokens, used.cached_tokens, used.output_tokens)
        return head + word(field) + b"".join(map(number_word, counts)) + word(b"%d" % round(used.kv_byte_seconds))

    def remember(self, answer: list[bytes]) -> Levels:
        """Return the levels of an answer, and remember them in case the store loses them."""
        levels = Levels.of(answer)
        if levels.generation:
            self.last_levels = levels
        return levels

    def used(self, levels: Levels) -> tuple[int, ...]:
        return levels.numbers[: len(self.limits)]

    def carry_over(self, older: "QuotaAccount") -> None:
        """Take over the levels of older limits, which these replace."""
        if older.last_levels is not None:
            used = dict(zip(map(_id, older.limits), older.used(older.last_levels), strict=True))
            numbers = [used.get(_id(limit), 0) for limit in self.limits]
            self.last_levels = Levels.at(older.last_levels.now, older.last_levels.generation, numbers)

    def states(self, levels: Levels) -> tuple[LimitState, ...]:
        """The state of each limit. Amounts set aside for replicas count as remaining."""
        now, *taken = map(int, self._figures.unpack_from(levels.doubles))
        count = len(taken)
        known = len(levels.doubles) == 8 * (1 + 3 * count)
        asides, lost = (levels.numbers[at * count :][:count] if known else (0,) * count for at in (1, 2))
        states = [
            LimitState(
                limit,
                (capacity - used) // scale if used < capacity else 0,
                used / rate if rate else _until_period_ends(limit, used, now),
                aside // scale,
                gone,
            )
            for (limit, capacity, scale, rate), used, aside, gone in zip(self._rows, taken, asides, lost, strict=True)
        ]
        return tuple(states)

    def refusal(self, ask: Ask, levels: Levels) -> QuotaRefused:
        """The refusal with the longest wait."""
        refusals = []
        taken = map(sum, zip(self.used(levels), levels.numbers[len(self.limits) :], strict=True))
        for limit, scale, used in zip(self.limits, self.scales, taken, strict=True):
            asked, left = ask.of(limit), limit.capacity * scale - used
            if asked and asked * scale > left:
                refusals.append(_refusal(limit, asked, max(left, 0) // scale, asked * scale - left, levels.now))
        return max(refusals, key=lambda pair: pair[0])[1]

    def record(self, tracked: TrackedReservation) -> list[bytes]:
        """Return the field of a reservation and its value, as lua/record.lua reads it."""
        ask, booked = tracked.reservation.ask, tracked.booked
        asked = (ask.requests, ask.input_tokens, ask.output_tokens)
        done = (booked.input_tokens, booked.cached_tokens, booked.output_tokens)
        return [
            tracked.field,
            RECORD.pack(*asked, *done, tracked.first_day, tracked.last_day, tracked.last_day_output) + self._spec,
        ]

    @cached_property
    def _key_levels(self) -> bytes:
        return self.state + b":key:" + key_name(self.key).encode()

    def _columns(self) -> list[list[int | str]]:
        """Return the columns that lua/spec.lua describes."""
        scaled = list(zip(self.limits, self.scales, strict=True))
        return [
            [_field(limit) for limit in self.limits],
            [_letter(limit) for limit in self.limits],
            [_window(limit) for limit in self.limits],
            [*self.scales],
            [limit.amount for limit in self.limits],
            [limit.capacity * scale for limit, scale in scaled],
        ]

    def _packed(self, columns: Sequence[Sequence[int | str]]) -> bytes:
        own = sum(limit.key is None for limit in self.limits)
        return packed([len(self.limits), own, key_name(self.key), *(cell for column in columns for cell in column)])

    def _head(self, source: Source, extra: int) -> bytes:
        count = 3 + len(self.keys) + NUM_ARGUMENTS + extra
        call = words(b"EVALSHA", source.digest, b"%d" % len(self.keys), *self.keys)
        return b"*%d\r\n" % count + call + self._constants


_known = lru_cache(maxsize=1024)(word)  # of a generation, which outlives many calls


def key_name(key: str | None) -> str:
    return NO_KEY if key is None else quote(key, safe="", errors="surrogatepass")


def _scopes(limits: tuple[Limit, ...]) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    """Split the limits into those of the tenant and those of the key."""
    own = tuple(limit for limit in limits if limit.key is None)
    return own, limits[len(own) :]


def _least(limits: Iterable[Limit]) -> float:
    return min((limit.capacity for limit in limits), default=math.inf)


def _id(limit: Limit) -> tuple[str, str | None]:
    return _field(limit), limit.key


def _field(limit: Limit) -> str:
    return replace(limit, key=None).name


def _letter(limit: Limit) -> str:
    """The letter of what is counted; of cost, the prices follow it, so that a reservation keeps those of its time."""
    return LETTERS[limit.resource] if limit.prices is None else letter_of_money(limit.prices)


def letter_of_money(prices: TokenPrices) -> str:
    return f"m{prices.input},{prices.cached_input},{prices.output}"


def _window(limit: Limit) -> int | str:
    match limit.window:
        case Rate(seconds=seconds):
            return seconds
        case Budget(period=period):
            return period.value
    return "held"


def _life(limit: Limit) -> float:
    """The seconds after which no usage counts any more."""
    match limit.window:
        case Rate(seconds=seconds, burst=burst):
            return seconds * burst / limit.amount
        case Budget(period=period):
            return MAX_PERIOD_DAYS[period] * 86400.0
    return 0.0


def _until_period_ends(limit: Limit, used: int, now: int) -> float:
    """The seconds until a used budget is full again; 0 for held resources."""
    if used and isinstance(limit.window, Budget):
        return limit.window.period.end(now) - now / 1e6
    return 0.0


def _refusal(limit: Limit, asked: int, left: int, missing: int, now: int) -> tuple[float, QuotaRefused]:
    """Return the seconds to wait and the refusal; `missing` is scaled."""
    match limit.window:
        case Rate():
            wait = missing / limit.amount
            return wait, LimitExceeded(limit, asked, left, wait)
        case Budget(period=period):
            end = period.end(now)
            return end - now / 1e6, BudgetSpent(limit, asked, left, end)
    return 0.0, LimitExceeded(limit, asked, left, None)
