"""Adds what the product is compared with to its choices, once this is imported: orders, batching rules and more."""

import labs.batchings.published
import labs.contiguous_pool
import labs.controlled_delay
import labs.orderings.published  # noqa: F401 - adds orders
