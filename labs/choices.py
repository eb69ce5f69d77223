"""Adds the comparisons and baselines to the product's choices, once this is imported: orders, batching rules and
more.
"""

import labs.batchings.published
import labs.contiguous_pool
import labs.controlled_delay
import labs.orderings.published  # noqa: F401 - adds orders
