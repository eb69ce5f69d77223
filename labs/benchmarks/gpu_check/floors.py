"""The least time of a step, by the measured rates of the same device in the same run.

A step reads every weight once and each sequence's keys and values once, and multiplies meanwhile: see
`backend.roofline`.
"""

import torch

from backend.model.model_config import ModelConfig
from backend.roofline import Footprint, Peaks, Roofline
from backend.scheduler.batch import Batch
from labs.benchmarks.gpu_check.models import dtype_of
from labs.benchmarks.kernels_gpu import peaks_of


def measured_roofline(model: ModelConfig, device: torch.device) -> Roofline:
    """By the rates of a large copy and of a large product, now."""
    dtype = dtype_of(device)
    measured = peaks_of(device, dtype)
    peaks = Peaks(measured.bandwidth, measured.matrix_rate, measured.matrix_rate)
    return Roofline(Footprint(model, str(dtype).removeprefix("torch.")), peaks)


def step_floor(roofline: Roofline, batch: Batch) -> float:
    """Seconds of a step. Products of attention count beside those with weights, and logits for rows that sample."""
    footprint, model = roofline.footprint, roofline.footprint.model
    spans = list(zip(batch.starts, batch.lengths, strict=True))
    pairs = sum(length * start + length * (length + 1) // 2 for start, length in spans)
    operations = 2 * footprint.num_multiplied_by_token * sum(batch.lengths)
    operations += 2 * model.hidden_size * model.vocab_size * len(batch.sampled)
    operations += 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    bandwidth = roofline.peaks.bandwidth
    reading = sum(footprint.kv_bytes_read(start + length) for start, length in spans) / bandwidth
    return max(footprint.bytes_read(sum(batch.lengths)) / bandwidth, operations / roofline.rate) + reading
