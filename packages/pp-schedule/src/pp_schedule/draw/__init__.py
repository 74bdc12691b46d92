"""Pictures of an order, or of a timeline that was simulated or measured. No torch."""

from pp_schedule.draw.html import draw_html
from pp_schedule.draw.png import draw_png
from pp_schedule.draw.text import draw_text
from pp_schedule.draw.trace import chrome_trace

__all__ = ["chrome_trace", "draw_html", "draw_png", "draw_text"]
