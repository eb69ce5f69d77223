"""Puts compiled code into a wheel: a hook of hatchling, which `scripts/wheel` enables."""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelBinaries(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled core and the kernels from the folder that `SLUICE_WHEEL_BINARIES` names. The core goes where
    `backend.compiled_core` looks for it: `share/sluice` of the environment.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(os.environ["SLUICE_WHEEL_BINARIES"])
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["shared_data"][str(folder / "core")] = "share/sluice"
        build_data["force_include"][str(folder / "kernels")] = "backend/kernels/libraries"
