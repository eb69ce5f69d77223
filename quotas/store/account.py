"""The limits of one API key of a tenant, as the store's scripts take them, and the scripts' answers. Pure."""

import dataclasses
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple
from urllib.parse import quote

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, QuotaRefused, SessionSpent
from quotas.policy.limit import (
    QUARTER_MICROSECONDS,
    UTC_CALENDAR,
    Budget,
    BudgetPeriod,
    Limit,
    PerSession,
    Rate,
    Resource,
    TokenPrices,
)
from quotas.policy.policy import Outage
from quotas.reservation import NO_USAGE, Ask, LimitState, Reservation, Usage
from quotas.store.redis_link import number_word, word, words
from quotas.store.scripts import Script, Source
from quotas.store.zone_offsets import zone_offsets
from quotas.usage_row import key_name

SHORT_STRING_BYTES = 32  # below it, a string's length shares its type byte
SMALL_INTEGER = 128  # below it, an integer is its type byte


def packed(values: Sequence[int | str], more: int = 0) -> bytes:
    """Pack an array of at most 65535 unsigned integers and strings of at most 65535 bytes as MessagePack; `more` of
    them follow.
    """
    return b"\xdc" + (len(values) + more).to_bytes(2) + b"".join(map(_packed, values))


def _packed(value: int | str) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(1) if value < SMALL_INTEGER else b"\xcf" + value.to_bytes(8)
    text = value.encode()
    head = bytes([0xA0 | len(text)]) if len(text) < SHORT_STRING_BYTES else b"\xda" + len(text).to_bytes(2)
    return head + text


PREFIX = "sluice"
PLAIN = re.compile(r"[A-Za-z0-9_.~-]+")  # a name that is its own quotation, as most are
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
MAX_PERIOD_DAYS = {BudgetPeriod.DAY: 2, BudgetPeriod.WEEK: 8, BudgetPeriod.MONTH: 32}  # days, with a change of clocks
IDLE_SESSION_SECONDS = 86_400.0  # after which a session begins anew
SPARE_SECONDS = 3600.0  # that state outlives its last effect
SOFT_CAPACITY = 2**53  # of a budget that refuses nothing: the most that the scripts count
NUM_ARGUMENTS = 10  # as lua/account.lua names them


def state_key(tenant: str) -> str:
    """Return the key of a tenant's state. One hash slot holds all of the tenant's keys, for any name."""
    return f"{PREFIX}:{{{_quoted(tenant)}}}"


def team_state_key(team: str) -> str:
    """Return the key of a team's state, which is no tenant's: no name has a colon once it is quoted."""
    return f"{PREFIX}:{{team:{_quoted(team)}}}"


def _quoted(name: str) -> str:
    return name if PLAIN.fullmatch(name) else quote(name, safe="", errors="surrogatepass")


def levels_key(tenant: str, limit: Limit) -> bytes:
    """Return the key of the hash with the level of a limit of the tenant's requests."""
    if limit.team is not None:
        return team_state_key(limit.team).encode()
    state = state_key(tenant)
    if limit.session is not None:
        return f"{state}:session:{limit.session}".encode()
    return (state if limit.key is None else f"{state}:key:{key_name(limit.key)}").encode()


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
    first: int = 0  # quarter of an hour of the charge, counted from the Unix epoch
    last: int = 0  # quarter of the newest extension in a later one; else as `first`
    last_output: int = 0  # tokens added in a later `last`
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

    def charged_again(self, quarter: int) -> None:
        self.first = self.last = quarter
        self.last_output = 0

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
    def quarter(self) -> int:
        """The quarter of an hour of the time."""
        return self.now // QUARTER_MICROSECONDS

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers after the time."""
        return tuple(map(int, struct.unpack_from(f"<{len(self.doubles) // 8 - 1}d", self.doubles, 8)))


class QuotaAccount:
    """The limits of a tenant, its key, its team and its session, as the scripts take them: see lua/account.lua."""

    def __init__(
        self,
        tenant: str,
        key: str | None,
        limits: tuple[Limit, ...],
        replica: str,
        lease: float,
        state: bytes | None = None,
    ) -> None:
        """`limits` are all limits of its requests: the tenant's, the key's, the team's, and then the session's. `lease`
        is in seconds.

        With `state`, the key of a team's state, the limits are that team's alone.
        """
        self.tenant = tenant
        self.key = key
        self.limits = limits
        self.scales = tuple(limit.window.seconds if isinstance(limit.window, Rate) else 1 for limit in self.limits)
        self.state = state or state_key(tenant).encode()
        self._rows = [
            (limit, limit.capacity * scale, scale, limit.amount if isinstance(limit.window, Rate) else 0)
            for limit, scale in zip(limits, self.scales, strict=True)
        ]
        by_owner = [tuple(scope) for _, scope in groupby(limits, _owner)] if state is None else [limits]
        self.scopes = {state or levels_key(tenant, scope[0]): scope for scope in by_owner if scope}
        self.session = next((levels for levels, scope in self.scopes.items() if scope[0].session), None)
        self.shared = tuple(levels for levels, scope in self.scopes.items() if scope[0].team and state is None)
        self.watched = [
            (limits.index(limit), levels) for levels, scope in self.scopes.items() for limit in scope if limit.alerts
        ]  # places of limits with alerts, and the keys of their levels
        self.life = _life(limits)
        hard = [limit for limit in self.limits if not limit.is_soft]
        self._fewest_requests = _least(limit for limit in hard if limit.resource in BY_REQUEST)
        self._fewest_tokens = _least(limit for limit in hard if limit.resource in BY_TOKEN)
        self._limits_cost = any(limit.resource is Resource.COST for limit in hard)
        self.reservations: dict[str, TrackedReservation] = {}
        self.last_levels: Levels | None = None
        self.last_used = 0.0  # by the replica's clock
        columns = self._columns()
        self._kept_spec = packed(self._spec(columns[:4]), more=1)  # the row follows
        self._constants = words(
            packed(self._spec(columns)),
            b"%d" % round(lease * 1e6),
            b"%d" % round(self.life * 1e3),
            replica_field(replica),
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
            if (asked := ask.of(limit)) > limit.capacity and not limit.is_soft:
                raise NeverFits(limit, asked)

    def command(self, script: Script, source: Source, ask: Ask, field: bytes, rest: Sequence[bytes] = ()) -> bytes:
        """Return the call, in RESP, of a script that begins as lua/account.lua says."""
        head = self._heads.get((script, len(rest)))
        if head is None:
            head = self._heads[script, len(rest)] = self._head(source, len(rest))
        asked = number_word(ask.requests), number_word(ask.input_tokens), number_word(ask.output_tokens)
        call = head + _known(self.generation) + word(field) + b"".join(asked) + word(self._spec_of(ask))
        return call + words(*rest) if rest else call

    def settlement(self, source: Source, field: bytes, used: Usage) -> bytes:
        """Return the call of lua/settle.lua, in RESP."""
        head = self._heads.get((Script.SETTLE, 0))
        if head is None:
            head = b"*11\r\n" + words(b"EVALSHA", source.digest, b"1", self.state)
            self._heads[Script.SETTLE, 0] = head
        counts = (used.requests, used.input_tokens, used.cached_tokens, used.output_tokens)
        kv = word(b"%d" % round(used.kv_byte_seconds))
        return head + word(field) + b"".join(map(number_word, counts)) + kv + number_word(used.reasoning_tokens)

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
            used = dict(zip((limit.name for limit in older.limits), older.used(older.last_levels), strict=True))
            numbers = [used.get(limit.name, 0) for limit in self.limits]
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
                used / rate if rate else until_period_ends(limit, used, now),
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
            if asked and asked * scale > left and not limit.is_soft:
                refusals.append(_refusal(limit, asked, max(left, 0) // scale, asked * scale - left, levels.now))
        return max(refusals, key=lambda pair: pair[0])[1]

    def record(self, tracked: TrackedReservation) -> list[bytes]:
        """Return the field of a reservation and its value, as lua/record.lua reads it."""
        ask, booked = tracked.reservation.ask, tracked.booked
        asked = (ask.requests, ask.input_tokens, ask.output_tokens)
        done = (booked.input_tokens, booked.cached_tokens, booked.output_tokens)
        return [
            tracked.field,
            RECORD.pack(*asked, *done, tracked.first, tracked.last, tracked.last_output) + self._spec_of(ask),
        ]

    def _columns(self) -> list[list[int | str]]:
        """Return the columns that lua/spec.lua describes."""
        scaled = list(zip(self.limits, self.scales, strict=True))
        return [
            [limit.label for limit in self.limits],
            [_letter(limit) for limit in self.limits],
            [_window(limit) for limit in self.limits],
            [*self.scales],
            [limit.amount for limit in self.limits],
            [SOFT_CAPACITY if limit.is_soft else limit.capacity * scale for limit, scale in scaled],
        ]

    def _spec(self, columns: Sequence[Sequence[int | str]]) -> list[int | str]:
        """Return what lua/spec.lua describes, with these columns."""
        own = len(self.scopes.get(self.state, ()))
        cells = [cell for column in columns for cell in column]
        for levels in (*self.shared, *([self.session] if self.session else ())):
            scope = self.scopes[levels]
            cells += [levels.decode(), len(scope), round(_life(scope) * 1e3)]
        return [len(self.limits), own, key_name(self.key), *cells]

    def _spec_of(self, ask: Ask) -> bytes:
        """Return the spec as a reservation keeps it, with the row of the ledger in which its use is booked."""
        return self._kept_spec + _packed(ask.row or key_name(self.key))

    def _head(self, source: Source, extra: int) -> bytes:
        keys = [self.state, *(levels for levels in self.scopes if levels != self.state)]
        count = 3 + len(keys) + NUM_ARGUMENTS + extra
        call = words(b"EVALSHA", source.digest, b"%d" % len(keys), *keys)
        return b"*%d\r\n" % count + call + self._constants


_known = lru_cache(maxsize=1024)(word)  # of a generation, which outlives many calls


def _owner(limit: Limit) -> tuple[str | None, ...]:
    return limit.key, limit.team, limit.session


def _least(limits: Iterable[Limit]) -> float:
    return min((limit.capacity for limit in limits), default=math.inf)


def _letter(limit: Limit) -> str:
    """The letter of what is counted; of cost, the prices follow it, so that a reservation keeps those of its time."""
    return LETTERS[limit.resource] if limit.prices is None else letter_of_money(limit.prices)


def letter_of_money(prices: TokenPrices) -> str:
    reasoning = "" if prices.reasoning == prices.output else f",{prices.reasoning}"
    return f"m{prices.input},{prices.cached_input},{prices.output}{reasoning}"


def _window(limit: Limit) -> int | str:
    match limit.window:
        case Rate(seconds=seconds):
            return seconds
        case Budget(period=period, calendar=calendar):
            offsets = "" if calendar == UTC_CALENDAR else zone_offsets(calendar.time_zone)
            return f"{period}/{calendar.week_starts}/{offsets}" if offsets else period.value
        case PerSession() as session:
            return session.unit
    return "held"


def _life(limits: Iterable[Limit]) -> float:
    """The seconds that the levels of these limits are kept without use, a while longer than any usage counts."""
    return SPARE_SECONDS + max(map(_seconds_counted, limits), default=0.0)


def _seconds_counted(limit: Limit) -> float:
    match limit.window:
        case Rate(seconds=seconds, burst=burst):
            return seconds * burst / limit.amount
        case Budget(period=period):
            return MAX_PERIOD_DAYS[period] * 86400.0
        case PerSession():
            return IDLE_SESSION_SECONDS
    return 0.0


def until_period_ends(limit: Limit, used: int, now: int) -> float:
    """The seconds until a used budget is full again; 0 for held resources."""
    if used and isinstance(limit.window, Budget):
        return limit.window.end(now) - now / 1e6
    return 0.0


def _refusal(limit: Limit, asked: int, left: int, missing: int, now: int) -> tuple[float, QuotaRefused]:
    """Return the seconds to wait and the refusal; `missing` is scaled."""
    match limit.window:
        case Rate():
            wait = missing / limit.amount
            return wait, LimitExceeded(limit, asked, left, wait)
        case Budget() as budget:
            end = budget.end(now)
            return end - now / 1e6, BudgetSpent(limit, asked, left, end)
        case PerSession():
            return math.inf, SessionSpent(limit, asked, left)
    return 0.0, LimitExceeded(limit, asked, left, None)
