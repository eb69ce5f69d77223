"""Writes the documents by which SGLang's router and others know and balance replicas. Pure.

The fields are those of SGLang's `/v1/loads`, `/server_info` and `/model_info` that smg reads (its
`SchedulerLoadSnapshot`, `ServerInfo` and `ModelInfo`); all are of one rank, and none is of a tenant.
"""

from datetime import datetime
from typing import Any

from gateway.replica.state import LoadTotals
from gateway.version import VERSION

Document = dict[str, Any]


def loads(totals: LoadTotals, now: datetime) -> Document:
    """The body of /v1/loads, the same for every `include` of a query."""
    requests, usage = totals.running + totals.waiting, totals.held_tokens / totals.total_tokens
    load: Document = {
        "dp_rank": 0,
        "num_running_reqs": totals.running,
        "num_waiting_reqs": totals.waiting,
        "num_waiting_uncached_tokens": totals.waiting_tokens,
        "num_total_reqs": requests,
        "num_used_tokens": totals.held_tokens,
        "num_total_tokens": totals.held_tokens + totals.waiting_tokens,
        "max_total_num_tokens": totals.total_tokens,
        "token_usage": round(usage, 4),
        "gen_throughput": round(totals.tokens_per_second, 2),
        "cache_hit_rate": round(totals.cache_hit_rate, 4),
        "utilization": round(max(usage, totals.running / totals.seats), 4),
        "max_running_requests": totals.seats,
        "queues": {"waiting": totals.waiting, "grammar": 0, "paused": 0, "retracted": 0},
    }
    aggregate = {
        "total_running_reqs": totals.running,
        "total_waiting_reqs": totals.waiting,
        "total_reqs": requests,
        "avg_token_usage": load["token_usage"],
        "avg_throughput": load["gen_throughput"],
        "avg_utilization": load["utilization"],
    }
    head = {"timestamp": now.isoformat(), "version": VERSION, "dp_rank_count": 1}
    return {**head, "loads": [load], "aggregate": aggregate}


def server_info(model: str, max_model_len: int, totals: LoadTotals) -> Document:
    """The body of /server_info. The served name stands for the model's path, which is private."""
    return {
        "model_id": model,
        "model_path": model,
        "served_model_name": model,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "load_balance_method": "round_robin",  # of its single rank
        "disaggregation_mode": "null",
        "is_embedding": False,
        "context_length": max_model_len,
        "max_total_tokens": totals.total_tokens,
        "max_total_num_tokens": totals.total_tokens,
        "max_running_requests": totals.seats,
        "version": VERSION,
    }


def model_info(model: str) -> Document:
    """Return the body of /model_info."""
    return {
        "model_path": model,
        "tokenizer_path": model,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
