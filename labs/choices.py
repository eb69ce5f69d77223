"""Adds the published orders and batching rules to those of the product once it is imported."""

import labs.batchings.published
import labs.orderings.published  # noqa: F401 - adds orders
