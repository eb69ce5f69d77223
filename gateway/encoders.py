"""Loads the embedding and score models, beside the generating one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from admission.encoding import EncodingLimits
from backend.encoders.encoder import Encoder, load_encoder
from backend.errors import ModelLoadError
from backend.model.hub import resolve_encoder
from backend.worker.device_stream import DeviceStream, make_device_stream
from gateway.api.frontend import EncoderSetup
from gateway.settings.settings import Settings, encoder_name


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A model on the device; see `EncoderRunner`."""

    setup: EncoderSetup
    encoder: Encoder
    measured: Sequence[tuple[int, float]]
    stream: DeviceStream

    def vectors(self, inputs: Sequence[Sequence[int]]) -> list[bytes | None]:
        rows = self.encoder.run(inputs).reshape(len(inputs), -1)
        finite = rows.isfinite().all(1).tolist()
        return [row.numpy().tobytes() if sound else None for row, sound in zip(rows, finite, strict=True)]


MEASURED_INPUTS, MEASURED_TOKENS = (1, 16), 16  # sizes of the batches measured at startup, and tokens of each input


def load_encoders(settings: Settings, device: torch.device, dtype: torch.dtype) -> dict[str, LoadedEncoder]:
    """Load the models of these settings, by name. Raises `ModelLoadError`."""
    loaded: dict[str, LoadedEncoder] = {}
    for name in filter(None, (settings.embedding_model, settings.score_model)):
        directory = resolve_encoder(name)
        encoder = load_encoder(directory, device=device, dtype=dtype)
        config = encoder.config
        setup = EncoderSetup(
            encoder_name(name),
            directory,
            int(time.time()),
            config.kind,
            config.dim,
            config.max_tokens,
            config.vocab_size,
            config.default_prompt,
        )
        if setup.name in loaded:
            raise ModelLoadError(f"the embedding model and the score model are both called {setup.name!r}: rename one")
        measured = [_measured(encoder, count) for count in MEASURED_INPUTS]
        loaded[setup.name] = LoadedEncoder(setup, encoder, measured, make_device_stream(device, captures=False))
    return loaded


def _measured(encoder: Encoder, count: int) -> tuple[int, float]:
    """Run a batch of `count` inputs twice; returns its tokens and the second run's seconds."""
    tokens = min(MEASURED_TOKENS, encoder.config.max_tokens)
    for _ in range(2):
        began = time.perf_counter()
        encoder.run([[0] * tokens] * count)
    return tokens * count, time.perf_counter() - began


def encoding_limits(settings: Settings) -> EncodingLimits:
    return EncodingLimits(
        longest_wait_s=settings.embedding_queue_delay,
        batch_tokens=settings.embedding_batch_tokens,
        waiting_tokens=settings.embedding_queue_tokens,
    )
