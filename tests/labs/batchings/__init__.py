import labs.batchings.published  # noqa: F401 - adds batching rules
