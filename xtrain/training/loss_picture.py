"""loss.png: the loss curve of a run, drawn with matplotlib."""

import io
from typing import Any

SMOOTHING = 0.05  # weight of the newest loss in the running mean


def is_number(x: Any) -> bool:
    """Return True if x is a number that can be drawn. The user may have edited the log, so x may be
    anything."""
    return isinstance(x, (int, float)) and abs(x) < 1e300


def loss_png(metrics: list[dict[str, Any]], title: str) -> bytes:
    """Return training loss, its running mean and validation loss over the steps, as a PNG. metrics:
    lines of metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    training = [(m["step"], m["loss"]) for m in metrics if is_number(m.get("loss"))]
    validation = [(m["step"], m["val_loss"]) for m in metrics if is_number(m.get("val_loss"))]
    if training:
        axes.plot(*zip(*training), lw=0.6, alpha=0.4, color="tab:blue")
        smooth = []
        mean = training[0][1]
        for step, loss in training:
            mean += SMOOTHING * (loss - mean)
            smooth.append((step, mean))
        axes.plot(*zip(*smooth), color="tab:blue", label="training (running mean)")
    if validation:
        axes.plot(*zip(*validation), "o-", color="tab:red", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()
