"""What `sluice doctor` cannot do."""


class DoctorError(Exception):
    """A gateway that cannot be read; the message says what to look at."""
