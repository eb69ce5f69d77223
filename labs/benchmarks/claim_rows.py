"""The rows of the ledger of `claims`: what circulates, what its source says, and which figures judge it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from labs.benchmarks import claim_arithmetic as arithmetic
from labs.benchmarks import claim_measures as measures
from labs.benchmarks.claim_measures import Figures

Range = tuple[float, float]  # the least and the most that is claimed; an infinite one makes the other a bound


@dataclass(frozen=True, slots=True)
class Live:
    """A figure of another benchmark, measured on a live engine or server: a target of its result file."""

    scenario: str
    target: str
    figure: str  # how it is named here
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the ledger."""

    what: str
    source: str
    says: str
    claimed: Mapping[str, Range]  # by the name of a measured figure
    measure: Callable[[int, float], Figures] | None  # by a seed, and a share of the requests; None: live alone
    differs: str
    live: Live | None = None
    is_another: bool = field(default=False, kw_only=True)  # its source says something else than what circulates


ROWS = (
    Claim(
        "Continuous batching is 3 to 5x as fast as static",
        "guides; Orca (Yu et al., OSDI 2022)",
        "36.9x FasterTransformer at 175B and equal latency",
        {"x the throughput of padded batches of 32": (3.0, 5.0)},
        measures.static_to_continuous,
        "by what is padded; Orca's figure is throughput at one latency, which a static batch cannot have",
        Live("engine_peers", "float32: continuous over static batches of 8, varied lengths", "x packed batches of 8"),
    ),
    Claim(
        "+212 % throughput and -60 % p99 per token, by batching continuously",
        "guides",
        "its p99 per token gets worse by 60 %: the sign was misread",
        {"+% throughput beside padded batches": (2.12, 2.12), "+% p99 of a request's time per token": (-0.6, -0.6)},
        measures.continuous_tail,
        "measured at a load beyond what static batches complete; that of the source is not known",
        is_another=True,
    ),
    Claim(
        "4 to 20x, by the variance of lengths",
        "guides",
        "no source",
        {"x at a coefficient of variation of 2": (4.0, 20.0)},
        measures.length_variance,
        "20x takes answers more unlike each other than any trace's",
    ),
    Claim(
        "60 to 70 % of a static batch is padding",
        "guides",
        "no source",
        {"% of computed tokens": (0.6, 0.7)},
        measures.padding_waste,
        "grouping prompts by length nearly halves it; what is left is answers that differ",
    ),
    Claim(
        "Continuous batching raises the GPU's use from 62 to 94 %",
        "guides",
        "no source",
        {"% of rows filled by static batches": (0.62, 0.62), "% of rows filled by continuous ones": (0.94, 0.94)},
        measures.filled_rows,
        "use is what is filled of 32 rows: a GPU that computes a half-empty batch is busy all the same",
    ),
    Claim(
        "Chunked prefill costs < 5 % of throughput",
        "Sarathi-Serve (Agrawal et al., OSDI 2024)",
        "chunks of 2,048 cost almost nothing, of 512 at most a quarter of the prefill",
        {"+% throughput at 0.9 times capacity": (-0.05, inf)},
        measures.chunked_prefill,
        "at a load where both complete everything, so that it says little",
    ),
    Claim(
        "Chunked prefill: 2.6 to 5.6x the capacity",
        "Sarathi-Serve (Agrawal et al., OSDI 2024)",
        "2.6x for Mistral-7B, 3.7x for Yi-34B, 5.6x for Falcon-180B",
        {"x the capacity of whole prompts, with 99 % of tokens within 0.1 s": (2.6, 5.6)},
        measures.chunked_prefill,
        "by the tail of 0.1 s alone; the source bounds the wait for a slot as well",
    ),
    Claim(
        "Batching raises the GPU's efficiency from 8 to 70 %",
        "guides",
        "no source",
        {"% of its arithmetic by a batch of 1": (0.08, 0.08), "% of its arithmetic by a batch of 256": (0.7, 0.7)},
        arithmetic.efficiency,
        "a decode alone reads 16 GB for 16 GFLOP; contexts keep large batches far from the ridge",
    ),
    Claim(
        "Microbatches keep the stages of a pipeline busy",
        "guides; GPipe (Huang et al., 2019)",
        "a bubble of (stages - 1) / (microbatches + stages - 1)",
        {"% of the stages' time filled, decodes": (0.9, 1.0)},
        arithmetic.microbatches,
        "busy with reading the same weights four times: of the same rows decodes gain little, prompts nearly 4x",
    ),
    Claim(
        "Batching never changes answers",
        "guides",
        "no source; true of kernels whose sums do not depend on the batch",
        {"requests of 13,200 whose text changed": (0.0, 0.0)},
        None,
        "ours are of that kind, on the CPU; most are not (Thinking Machines, 2025)",
        Live(
            "batch_invariance",
            "requests that drew another text beside others",
            "requests of 13,200 whose text changed",
        ),
    ),
    Claim(
        "Scheduling a step costs milliseconds",
        "guides; vLLM before 0.6",
        "29 % of the time of Llama-3-8B on an H100 (vLLM's blog, 2024)",
        {"ms a step at 1,000 waiting, 50 tenants": (1.0, 10.0)},
        None,
        "planning is compiled, looks at the head of each tenant alone, and runs beside the device",
        Live(
            "decision_cost",
            "share of a 7.4 ms step at 1,000 waiting, 50 tenants",
            "ms a step at 1,000 waiting, 50 tenants",
            7.4,
        ),
    ),
    Claim(
        "PagedAttention is 24x as fast",
        "vLLM's first blog (2023)",
        "24x Hugging Face's transformers, in throughput",
        {"x the throughput of contiguous memory, chats in 20,000 tokens of it": (24.0, 24.0)},
        measures.paging,
        "24x is over an engine without continuous batching; memory alone brings what the next row says",
    ),
    Claim(
        "PagedAttention is 2 to 4x as fast as contiguous memory",
        "vLLM (Kwon et al., SOSP 2023)",
        "2 to 4x FasterTransformer and Orca at equal latency",
        {"x the throughput of contiguous memory, chats in 20,000 tokens of it": (2.0, 4.0)},
        measures.paging,
        "where memory is scarce; the device here is faster for its memory than the paper's",
    ),
    Claim(
        "KV waste falls from 60 to 80 % to below 5 %",
        "vLLM (Kwon et al., SOSP 2023)",
        "60 to 80 % wasted by others, below 4 % in blocks",
        {"% of held memory unused, contiguous": (0.6, 0.8), "% of held memory unused, in blocks": (-inf, 0.05)},
        measures.kv_use,
        "by the lengths declared: prompts of 1,000 tokens fill what they reserve; here 1,024 more are declared",
        Live("engine_peers", "float32: KV memory allocated but unused", "% of held memory unused, live", 1.0),
    ),
    Claim(
        "Paging reduces fragmentation by 70 %",
        "guides",
        "no source",
        {"+% unused memory by blocks": (-0.7, -0.7)},
        measures.kv_use,
        "blocks of 16 leave half a block a sequence",
    ),
    Claim(
        "Memory efficiency rises from 34 to 89 %",
        "guides; vLLM, figure 2",
        "20 to 38 % of memory holds tokens in others, 96 % in blocks",
        {"% of all memory used, contiguous": (0.34, 0.34), "% of all memory used, in blocks": (0.89, 0.89)},
        measures.kv_use,
        "admission keeps memory for answers that are still to come",
    ),
    Claim(
        "A sequence of a 70B model takes 17 GB of KV",
        "guides",
        "no source; 2.7 GB for 8,192 tokens",
        {"GB for a sequence of 8,192 tokens": (17.0, 17.0)},
        arithmetic.large_kv,
        "arithmetic: 8 KV heads in 16 bits, not 64",
    ),
    Claim(
        "1,000 tokens of KV of a 70B model are 4 GB, 0.3 s at 100 Gb/s",
        "guides",
        "no source; 335 MB, 27 ms",
        {"GB for 1,024 tokens": (4.0, 4.0), "s at 100 Gb/s": (0.3, 0.3)},
        arithmetic.large_kv,
        "arithmetic: 8 KV heads, not 64",
    ),
    Claim(
        "Swapping a gigabyte takes 2 ms",
        "guides",
        "no source; 40 ms",
        {"ms at 25 GB/s, what a PCIe 4 link of 16 lanes copies": (2.0, 2.0)},
        arithmetic.swapping,
        "arithmetic",
    ),
    Claim(
        "A prefill of 4,096 tokens costs 4,096 decode steps",
        "guides",
        "no source; about 27",
        {"steps of one decode": (4096.0, 4096.0)},
        arithmetic.decodes_of_prefill,
        "the published step times: a prompt's tokens are multiplied together",
    ),
    Claim(
        "Forecast admission preempts a third as often",
        "Past-Future (Gong et al., 2025); our reference simulation",
        "fewer evictions at the same throughput; 105 for 275",
        {"x the preemptions of optimistic admission": (0.33, 0.38)},
        measures.forecast_admission,
        "ours keeps more memory for what is still to come",
    ),
    Claim(
        "Learning to rank: +23.7 % throughput",
        "vllm-ltr (Fu et al., NeurIPS 2024)",
        "not in the paper",
        {"+% throughput": (0.237, 0.237)},
        measures.learned_rank,
        "another order of the same work leaves throughput as it is",
    ),
    Claim(
        "Learning to rank: 2.8x lower latency of chats",
        "vllm-ltr (Fu et al., NeurIPS 2024)",
        "2.8x",
        {"x sooner complete on average": (2.8, 2.8)},
        measures.learned_rank,
        "the paper pauses long answers that run; here who was admitted goes on",
    ),
    Claim(
        "Learning to rank: 6.5x in synthetic data generation",
        "vllm-ltr",
        "6.5x, the first 1,000 of 10,000 prompts",
        {"x as fast": (6.5, 6.5)},
        measures.learned_rank_offline,
        "the first tenth of 6,000, by a predictor that learns meanwhile",
    ),
    Claim(
        "10,000 pairs of synthetic data take 4 to 6 hours",
        "guides",
        "no source",
        {"h for 10,000 pairs": (4.0, 6.0)},
        measures.synthetic_pairs,
        "by how many are computed together: hours are one at a time",
    ),
    Claim(
        "SLAI: -53 % median time to first token",
        "Bari et al., 2025",
        "-53 %, Mistral-7B on an RTX ADA 6000",
        {"+% median time to the first token": (-0.53, -0.53)},
        measures.slai,
        "its -34 % p99, as it circulates, has no source",
    ),
    Claim(
        "SLAI: +26 % capacity",
        "Bari et al., 2025",
        "+26 % with a median below 0.5 s",
        {"+% load": (0.26, 0.26)},
        measures.slai_capacity,
        "capacity by the same rule, in steps of 5 %",
    ),
    Claim(
        "Magnus: +234 % throughput",
        "Cheng et al., 2024",
        "+66 to 234 %, and -60 to 89.7 % response time, over padded batches of a fixed size",
        {"+% throughput beside padded batches of 7": (2.34, 2.34)},
        measures.magnus,
        "and continuous batching leaves both behind; the -22.8 % that circulates is of another setting",
    ),
    Claim(
        "WAIT: 20 to 30 % more throughput near overload",
        "Ao et al., 2025",
        "version 2: more throughput and less latency than vLLM and Sarathi, no figure",
        {"+% throughput, wait": (0.2, 0.3)},
        measures.wait,
        "thresholds are 1 to 3 at a few arrivals a second: what helps is that memory lasts",
    ),
    Claim(
        "Multi-level feedback: 5.1x sooner on average",
        "FastServe (Wu et al., 2023)",
        "up to 5.1x the average completion of Orca, on synthetic skew",
        {"x sooner complete on average, in 8 rows at 1.1 times capacity": (5.1, 5.1)},
        measures.multilevel_feedback,
        "a row more costs a step little: where memory is there, more rows do what the levels were for, and more",
    ),
    Claim(
        "Dynamic batching by a window of 20 ms spares the device for a little delay",
        "Triton Inference Server",
        "depends on the model; no figure",
        {"% of the device's time spared by 20 ms": (0.01, inf), "ms later is p95, by 20 ms": (-inf, 20.0)},
        measures.window,
        "steps that are under way gather newcomers anyway: what a window saves is idle steps",
    ),
    Claim(
        "A virtual token counter bounds the gap between tenants; request round robin does not",
        "VTC (Sheng et al., OSDI 2024)",
        "a bound of twice the batch's tokens",
        {"x its bound of 40,000 weighted tokens": (-inf, 1.0), "x that gap in order round_robin": (2.0, inf)},
        measures.service_gaps,
        "deficit round robin keeps it as small",
    ),
    Claim(
        "Least laxity first is as good as earliest deadline first",
        "Dertouzos and Mok, 1989",
        "both optimal on one processor, with preemption, where all can be in time",
        {"x as many late or refused as earliest_deadline": (-inf, 1.0)},
        measures.least_laxity,
        "not all can be in time, and who began goes on; deadlines of 0.7, 2 and 8 s at 1.4 times capacity",
    ),
    Claim(
        "Highest response ratio next serves the short early and starves nobody",
        "Brinch Hansen, 1971; Magnus",
        "no figure of its own",
        {"x the mean completion of fcfs": (-inf, 0.9), "x the longest of fcfs": (-inf, 1.1)},
        measures.response_ratio,
        "blind to tenants, where fair is not; 27 tenants, 64 slots",
    ),
    Claim(
        "A boost after 200 to 500 ms of waiting keeps service fair",
        "tutorials",
        "vllm-ltr promotes after 200 steps, FastServe after 3 s",
        {"x the largest service gap of deficit round robin": (-inf, 1.0)},
        measures.starvation_boost,
        "the sketched rule turns around after 3.3 times its seconds",
    ),
    Claim(
        "Speculation by goodput: 3.2x lower latency",
        "SmartSpec (Liu et al., 2024)",
        "up to 3.2x, and never slower than none where a fixed length is",
        {"x sooner complete on average, at 0.3 times capacity, 70 % accepted": (3.2, 3.2)},
        measures.speculation,
        "acceptance is a parameter here: 70 %, and 30 % at high load",
    ),
    Claim(
        "Speculation is 2 to 3x for a request alone, and nothing above a batch of 16",
        "guides",
        "no source",
        {"x the tokens of none in 1 row": (2.0, 3.0), "x the tokens of none in 32 rows": (-inf, 1.05)},
        measures.speculation_by_batch,
        "by the ridge: on an A100 32 rows of 6 tokens still cost less than reading the weights twice",
    ),
    Claim(
        "Prefill and decode on devices of their own: 7.4x the requests",
        "DistServe (Zhong et al., OSDI 2024)",
        "2.0 to 4.6x the requests for chats, up to 7.4x, beside vLLM of its day",
        {"x the load of replicas that compute whole prompts first": (7.4, 7.4)},
        measures.disaggregation,
        "at 25 ms a token; at 40 ms all together serve as much: `sluice pools` says when it pays",
    ),
    Claim(
        "Phases apart: 1.4x the throughput at less cost",
        "Splitwise (Patel et al., ISCA 2024)",
        "1.4x the requests at 20 % less cost, 2.35x at the same cost and power, of other GPUs for tokens",
        {"x for conversations at 1.5 times a step": (1.4, 1.4)},
        measures.phase_splitting,
        "one kind of GPU, beside chunks, which its baseline has not; the traffic is of its own traces",
    ),
    Claim(
        "500 requests a second of a 70B model take 50 to 70 nodes",
        "guides",
        "no source",
        {"nodes of eight H100": (50.0, 70.0)},
        arithmetic.nodes,
        "by the lengths and the target: docs/simulation.md explains each number",
    ),
    Claim(
        "Admission by deadline keeps 85 % good at 1.4 times load, where no bound keeps 1 %",
        "our reference simulation",
        "85 %, 1 %",
        {"% good in time": (0.85, 0.85), "% unbounded and in order": (0.01, 0.01)},
        measures.deadline_admission,
        "other loads and lengths",
    ),
    Claim(
        "CoDel with adaptive LIFO keeps 71 % good",
        "Maurer, 2015; our reference simulation",
        "71 %",
        {"% by CoDel with adaptive LIFO": (0.71, 0.71)},
        measures.deadline_admission,
        "it gives up what has waited, and refuses nobody at once",
    ),
)
