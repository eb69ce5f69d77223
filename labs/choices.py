"""Adds published orders, batching rules and overload control to those of the product once it is imported."""

import labs.batchings.published
import labs.controlled_delay
import labs.orderings.published  # noqa: F401 - adds orders
