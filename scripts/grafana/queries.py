"""The queries that panels are made of: PromQL and its legend."""

Queries = tuple[tuple[str, str], ...]


def level(metric: str, by: str) -> Queries:
    """Of a gauge, as it is."""
    return ((f"sum by ({by}) ({metric}{{@}})", f"{{{{{by}}}}}"),)


def total(metric: str, legend: str = "") -> Queries:
    """The rate of a counter, over all series."""
    return ((f"sum({_rate(metric)})", legend),)


def rate(metric: str, by: str) -> Queries:
    """Of a counter, by a label."""
    return ((f"sum by ({by}) ({_rate(metric)})", f"{{{{{by}}}}}"),)


def mean(metric: str, by: str) -> Queries:
    """Of a histogram, by a label."""
    sums, counts = (f"sum by ({by}) ({_rate(f'{metric}_{part}')})" for part in ("sum", "count"))
    return ((f"{sums} / {counts}", f"{{{{{by}}}}}"),)


def per(metric: str, other: str, legend: str, selector: str = "@", of: str = "@") -> Queries:
    """The rate of one counter by that of another."""
    return ((f"sum({_rate(metric, selector)}) / sum({_rate(other, of)})", legend),)


def quantiles(metric: str, by: str = "", *shares: float) -> Queries:
    """Of a histogram, by labels (separated by commas) or over all series."""
    inner = f"le, {by}" if by else "le"
    rates = f"sum by ({inner}) ({_rate(f'{metric}_bucket')})"
    legend = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label)
    return tuple(
        (f"histogram_quantile({share:g}, {rates})", f"{legend}p{share * 100:g}") for share in shares or (0.5, 0.9, 0.99)
    )


def _rate(metric: str, selector: str = "@") -> str:
    return f"rate({metric}{{{selector}}}[$__rate_interval])"
