"""Memory without a name, which the processes share that are given its file."""

import mmap
import os


class SharedMemory:
    """Memory of zeros. It is gone with the last process that has it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("sluice-masks")
        os.ftruncate(self.fd, num_bytes)
        self.bytes = mmap.mmap(self.fd, num_bytes)

    def close(self) -> None:
        """Close the file; what was made of the memory stays as long as it is referred to."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
