"""The HTML page, in a real browser where there is one."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pp_schedule import Action, StageCosts, draw_html, simulate
from pp_schedule.orders import breadth_first_order, gpipe_order, one_f_one_b_order

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no Chromium: none of {', '.join(NAMES)} is on the PATH"
)
SIZE = (1200, 800)
# Chromium reads commands from file descriptor 3 and answers on 4.
START = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]\n"
    "for end, wanted in zip(ends, (3, 4)): os.dup2(end, wanted)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)


class Browser:
    """A headless Chromium with one page, driven by DevTools commands over a pipe."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs, self.commands = os.pipe()
        self.answers, also_theirs = os.pipe()
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs), str(also_theirs), *command],
            pass_fds=(theirs, also_theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(also_theirs)
        fcntl.fcntl(self.answers, fcntl.F_SETFL, os.O_NONBLOCK)
        self.received = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self.received:
            assert time.monotonic() < deadline, "Chromium does not answer"
            assert self.process.poll() is None, "Chromium has ended"
            try:
                self.received += os.read(self.answers, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        message, _, self.received = self.received.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        self.until("document.querySelector('canvas[data-boxes]') !== null")

    def ask(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + 30
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def complaints(self) -> list[dict[str, Any]]:
        """What the console would show, and what the page asked the network for."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        asked = [
            event
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
            and not event["params"]["request"]["url"].startswith(("file:", "data:"))
        ]
        return [event for event in self.events if event.get("method") in methods] + asked


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., Path]:
    """Draws a page and returns its path."""

    def draw(*arguments: Any, **options: Any) -> Path:
        path = tmp_path / "page.html"
        draw_html(arguments[0], path, *arguments[1:], **options)
        return path

    return draw


def place(browser: Browser, canvas: int, when: float, rank: int) -> tuple[float, float]:
    """Where on the screen a rank's row is at a time, when all of the timeline is in view."""
    found = browser.ask(
        f"(c => [toX(c, {when}) + c.getBoundingClientRect().left, c.getBoundingClientRect().top"
        f" + TOP + {rank} * c.pitch + c.row / 2])(canvases[{canvas}])"
    )
    return found[0], found[1]


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


# --- the page in a browser


def test_a_title_that_reads_like_the_page_itself(page: Callable[..., Path]) -> None:
    title = "<!--<script> {{data}} </script>"
    text = page(one_f_one_b_order(2, 2), title=title).read_text()
    found = re.search(r'id="data">(.*?)</script>', text)
    assert found is not None
    assert json.loads(found[1])["title"] == title
    assert "<" not in found[1]
    assert "<title>&lt;!--&lt;script&gt; {{data}} &lt;/script&gt;</title>" in text


@needs_chromium
def test_every_action_is_a_box(browser: Browser, page: Callable[..., Path]) -> None:
    browser.open(page(one_f_one_b_order(4, 8), title="1F1B"))
    assert browser.ask("canvases.length") == 1
    assert browser.ask("canvases[0].dataset.boxes") == str(4 * 8 * 2)
    assert browser.ask("canvases[0].dataset.merged") == "0"
    assert "bubble 27.3 %" in browser.ask("document.querySelector('h2').textContent")
    assert browser.ask("document.title") == "1F1B"
    legend = browser.ask("document.getElementById('legend').textContent")
    assert "F forward" in legend
    assert "B backward" in legend
    assert "weight" not in legend
    assert browser.complaints() == []


@needs_chromium
def test_a_box_has_its_stages_colour(browser: Browser, page: Callable[..., Path]) -> None:
    path = page(one_f_one_b_order(4, 8))
    browser.open(path)
    x, y = place(browser, 0, 0.2, 0)
    y -= 7  # above the label
    pixel = browser.ask(
        f"(box => Array.from(canvases[0].getContext('2d').getImageData("
        f"({x} - box.left) * devicePixelRatio, ({y} - box.top) * devicePixelRatio, 1, 1).data))"
        "(canvases[0].getBoundingClientRect())"
    )
    wanted = data_of(path)["colours"]["F"][0]
    assert "#{:02x}{:02x}{:02x}".format(*pixel[:3]) == wanted


@needs_chromium
def test_pointing_tells_details(browser: Browser, page: Callable[..., Path]) -> None:
    order = breadth_first_order({0: [0, 2], 1: [1, 3]}, 2)
    costs = StageCosts(activation_bytes=2.0**20, parameter_bytes=2.0**30)
    browser.open(page(order, costs))
    span = next(s for s in simulate(order).spans if s.action == Action(2, "B", 1))
    assert browser.ask("tip.hidden")
    x, y = place(browser, 0, (span.start + span.end) / 2, 0)
    browser.mouse("mouseMoved", x, y)
    browser.until("!tip.hidden")
    assert browser.ask("tip.textContent").splitlines() == [
        "rank 0, stage 2, microbatch 1",
        "backward",
        f"start {span.start:g}",
        f"end {span.end:g}",
        "duration 2",
    ]
    browser.mouse("mouseMoved", x, y + browser.ask("canvases[0].row / 2 + canvases[0].curve / 2"))
    browser.until("tip.textContent.includes('iB at')")
    assert re.match(r"rank 0: 2\.00\d GiB at .*\npeak 2\.00\d GiB", browser.ask("tip.textContent"))
    browser.mouse("mouseMoved", *place(browser, 0, 0.5, 1))
    browser.until("tip.textContent.includes('idle')")
    assert browser.ask("tip.textContent").splitlines()[0] == "rank 1 is idle"
    browser.mouse("mouseMoved", x, place(browser, 0, 0.0, 0)[1] - browser.ask("TOP"))
    browser.until("tip.textContent.includes('of 2 ranks idle')")
    browser.mouse("mouseMoved", 600, 5)
    browser.until("tip.hidden")
    assert browser.complaints() == []


@needs_chromium
def test_zoom_and_pan_change_the_axis(browser: Browser, page: Callable[..., Path]) -> None:
    ticks = "JSON.stringify(Array.from(axis.children).map(tick => tick.textContent))"
    browser.open(page(gpipe_order(4, 16), unit="s"))
    before = browser.ask(ticks)
    assert before.startswith('["0 s",')
    x, y = place(browser, 0, 20.0, 1)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    browser.until("view.to - view.from < whole / 2")
    browser.until(f"{ticks} !== {json.dumps(before)}")
    at_mouse = browser.ask(f"toTime(canvases[0], {x} - canvases[0].getBoundingClientRect().left)")
    assert abs(at_mouse - 20.0) < 0.1  # the time under the mouse stays, to a pixel
    zoomed = browser.ask("view.from")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    browser.until(f"view.from > {zoomed}")
    for button, holds in (
        ("in", "view.to - view.from < before"),
        ("out", "view.to - view.from > before"),
        ("all", "view.from === 0 && view.to === whole"),
    ):
        browser.ask("void (window.before = view.to - view.from)")
        browser.ask(f"document.getElementById('{button}').click()")
        browser.until(holds)
    browser.until(f"{ticks} === {json.dumps(before)}")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="+", text="+")
    browser.until("view.to - view.from < whole")
    assert browser.complaints() == []


@needs_chromium
def test_measured_above_simulated_on_one_axis(browser: Browser, page: Callable[..., Path]) -> None:
    slow = simulate(one_f_one_b_order(4, 8), StageCosts(forward=2.0))
    browser.open(page(slow, title="a </script> & <b>", simulated=one_f_one_b_order(4, 8)))
    headings = browser.ask("Array.from(document.querySelectorAll('h2')).map(h => h.textContent)")
    assert [heading.split(":")[0] for heading in headings] == ["measured", "simulated"]
    assert browser.ask("document.querySelector('h1').textContent") == "a </script> & <b>"
    assert place(browser, 0, 5.0, 0)[0] == place(browser, 1, 5.0, 0)[0]
    assert browser.ask("whole") == slow.makespan
    assert browser.ask("canvases.map(canvas => canvas.dataset.boxes)") == ["64", "64"]
    assert browser.complaints() == []


@needs_chromium
def test_many_actions_are_merged_until_one_zooms_in(
    browser: Browser, page: Callable[..., Path]
) -> None:
    costs = StageCosts(0.3, activation_bytes=1e9, boundary_bytes=1e8, bandwidth=1e9, latency=0.01)
    path = page(one_f_one_b_order(64, 256), costs)
    assert path.stat().st_size < 10e6
    browser.open(path)
    boxes, merged = (
        browser.ask(f"Number(canvases[0].dataset.{name})") for name in ("boxes", "merged")
    )
    assert merged > 0
    assert boxes + merged < 64 * 256 * 2
    browser.ask("show(300, 320)")
    browser.until("canvases[0].dataset.merged === '0'")
    assert browser.ask("Number(canvases[0].dataset.boxes)") > 64 * 10
    assert browser.complaints() == []


# --- the file alone


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for name, v in attributes if name in ("src", "href", "action")]


def test_the_file_asks_for_nothing_else(page: Callable[..., Path]) -> None:
    text = page(one_f_one_b_order(2, 2)).read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert tags.addresses == ["data:,"]
    assert "default-src 'none'" in text
    assert "{{" not in text


def test_the_data_are_the_timeline(page: Callable[..., Path]) -> None:
    order = one_f_one_b_order(3, 4)
    costs = StageCosts([1.0, 1.5, 0.1], activation_bytes=10.0)
    timeline = simulate(order, costs)
    (data,) = data_of(page(order, costs))["timelines"]
    for rank, row in enumerate(data["ranks"]):
        spans = list(zip(*(row["spans"][field::5] for field in range(5)), strict=True))
        wanted = [
            ("FB".index(a.kind), *a[::2], pytest.approx(start), pytest.approx(end))
            for r, a, start, end in timeline.spans
            if r == rank
        ]
        assert spans == wanted
        assert row["bubble"] == pytest.approx(timeline.bubbles[rank])
        memory = list(zip(row["memory"][::2], row["memory"][1::2], strict=True))
        assert memory == [pytest.approx(point) for point in timeline.memory(rank)]


def test_dark_text_is_readable_on_every_colour(page: Callable[..., Path]) -> None:
    def luminance(code: str) -> float:
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p < 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    order = {0: [Action(0, kind, 0) for kind in "FIW"], 1: [Action(1, kind, 0) for kind in "FB"]}
    colours = data_of(page(order))["colours"]
    assert colours.keys() == set("FBIW")
    for shades in colours.values():
        assert len(set(shades)) == 2
        for shade in shades:
            assert (luminance(shade) + 0.05) / (luminance("#1a1a1a") + 0.05) > 4.5  # WCAG AA
