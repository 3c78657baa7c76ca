"""Tables in Markdown, with the machine of their records below (tables.py)."""

from _charts import NOTHING


def table(header: list[str], rows: list[list[str]], records: list[dict], count: str = "One") -> str:
    """Return header, rows, and the machine that the records come from, as Markdown."""
    if not rows:
        return NOTHING
    align = ["---"] + ["---:"] * (len(header) - 1)
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, align, *rows]]
    return "\n".join(lines) + "\n\n" + machine(records, count)


def machine(records: list[dict], count: str) -> str:
    """Return the line below a table: the GPU and the dates of its records."""
    gpus = ", ".join(sorted({r["gpu"] or "CPU" for r in records}))
    dates = sorted({r["date"] for r in records})
    period = " to ".join(sorted({dates[0], dates[-1]}))
    return f"{count} {gpus}, {period}."


def number(x: float | None, form: str = ",.0f") -> str:
    """Return x formatted; "-" for None."""
    return "-" if x is None else format(x, form)
