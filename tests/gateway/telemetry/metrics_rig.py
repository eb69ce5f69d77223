"""A core, its telemetry and their metrics, on a virtual clock, without a socket or a device."""

import re
from collections.abc import Iterator

from admission.core import CoreConfig, MemoryGate
from backend.config import EngineConfig
from backend.roofline import Roofline
from gateway.http.connection_table import ConnectionTable
from gateway.telemetry.metrics.metrics import Metrics, Sources
from gateway.telemetry.metrics.prometheus import exposition
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline, Telemetry
from gateway.tenants.live_policy import LivePolicy
from gateway.workers.stats import PoolStats
from tests.gateway.paper_store import PaperStore
from tests.gateway.telemetry.core_run import CoreRun
from tests.gateway.telemetry.records import a_record

SAMPLE = re.compile(r'([a-z0-9_:]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"')
BLOCK_BYTES = 1024


class Page:
    """A parsed page of metrics; parsing fails where the format is broken."""

    def __init__(self, text: str) -> None:
        assert text.endswith("\n")
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        family = ""
        for line in text.removesuffix("\n").split("\n"):
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name == family and name not in self.kinds
                self.kinds[name] = kind
            elif line.startswith("# HELP "):
                family = line.split(" ")[2]
            else:
                match = SAMPLE.fullmatch(line)
                assert match, line
                assert match[1].removeprefix(family) in ("", "_bucket", "_sum", "_count"), "a sample outside its family"
                series = match[1], frozenset(LABEL.findall(match[2]))
                assert series not in self.samples
                self.samples[series] = float(match[3])

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels among theirs; there must be one."""
        wanted = set(labels.items())
        found = [value for (other, pairs), value in self.samples.items() if other == name and wanted <= pairs]
        assert found, f"no sample of {name} with {labels}"
        return sum(found)

    def labels(self, name: str, label: str) -> set[str]:
        return {value for (other, pairs) in self.samples if other == name for key, value in pairs if key == label}

    def buckets(self, name: str) -> Iterator[float]:
        return (value for (found, _), value in self.samples.items() if found == f"{name}_bucket")


class PaperEngine:
    num_streams = 0


class Rig(CoreRun):
    def __init__(
        self,
        num_blocks: int = 64,
        config: CoreConfig | None = None,
        roofline: Roofline | None = None,
        **engine_fields: object,
    ) -> None:
        engine = EngineConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=min(128, 4 * num_blocks),
            **{"prefill_chunk": 8, **engine_fields},  # type: ignore[arg-type]
        )
        super().__init__(config or CoreConfig(memory=MemoryGate.OPTIMISTIC), engine)
        self.telemetry = Telemetry(lambda: self.now)
        self.policies = LivePolicy(None)
        self.store = PaperStore()
        self.engine = PaperEngine()
        memory = {"weights": 10, "kv_cache": 20, "other": 0}
        self.metrics = Metrics(
            Sources(
                "embedded",
                self.engine,  # type: ignore[arg-type]  # all that is read of it
                self.core,
                self.core_telemetry,
                self.telemetry,
                self.policies,
                self.store,
                BLOCK_BYTES,
                lambda: memory,
                ConnectionTable(8),
                10.0,
                roofline=roofline,
            )
        )
        PoolStats(0, int).show(self.metrics.registry)

    def page(self) -> Page:
        return Page(exposition(self.metrics.registry.collect(), self.metrics.constant).decode())

    def value(self, name: str, **labels: str) -> float:
        return self.page().value(name, **labels)

    def labels(self, name: str, label: str) -> set[str]:
        return self.page().labels(name, label)

    def record(self, *timelines: SequenceTimeline) -> RequestRecord:
        tenant = timelines[0].sequence.tenant if timelines else "acme"
        record = a_record(began=self.now, tenant=tenant, timelines=list(timelines), outcome=None, ended=None)
        self.telemetry.live.add(record)
        return record

    def tell(self, record: RequestRecord) -> None:
        for listener in self.telemetry.on_end:
            listener(record)


def rig_after_preemptions() -> Rig:
    """Two sequences have ended that outgrew the memory, so that one gave way to the other."""
    rig = Rig(num_blocks=12)
    for name in "ab":
        rig.arrive(name, prompt=8, max_tokens=30)
    rig.run()
    return rig
