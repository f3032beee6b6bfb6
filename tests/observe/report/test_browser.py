"""report.html in a real browser: curves and pictures are visible, and nothing is fetched."""

import html
import http.server
import json
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from observe_runs import make_run, rollout_records
from PIL import Image
from waiting import finished

from lightrft_visual.observe.recorder import RunRecorder
from lightrft_visual.observe.report.curves import PALETTE
from lightrft_visual.observe.report.page import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (scripts/setup.sh installs it)")


def browse(page: Path, folder: Path, *more: str) -> subprocess.CompletedProcess:
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *FLAGS, profile, *more, page.resolve().as_uri()]
    return finished(command, 150)


def screenshot(page: Path, folder: Path, height: int) -> np.ndarray:
    target = folder / "shot.png"
    done = browse(page, folder, f"--window-size=1240,{height}", "--virtual-time-budget=8000", f"--screenshot={target}")
    assert target.exists(), done.stderr[-2000:]
    assert "Content Security Policy" not in done.stderr and "Uncaught" not in done.stderr, done.stderr[-2000:]
    with Image.open(target) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def count(pixels: np.ndarray, color: str) -> int:
    wanted = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    return int((np.abs(pixels - wanted).max(axis=-1) <= 8).sum())


def test_curves_pictures_and_tables_are_visible(tmp_path):
    make_run(tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    pixels = screenshot(page, tmp_path, 3600)
    assert pixels.shape[1] == 1240
    assert count(pixels, PALETTE[0]) > 500 and count(pixels, PALETTE[1]) > 100  # lines
    assert min(count(pixels, color) for color in ("#ff0000", "#008000", "#0000ff")) > 300  # discs in pictures
    dark = (pixels.max(axis=-1) < 80).sum()
    assert dark > 5000  # text


class Listener(http.server.BaseHTTPRequestHandler):
    """Notes every request."""

    hits: list[str] = []

    def do_GET(self):
        self.hits.append(self.path)
        self.send_response(404)
        self.end_headers()

    def log_message(self, *arguments):
        """Quiet."""


def test_nothing_is_fetched_and_no_foreign_script_runs(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        hostile = (
            f"<img src={address}/img><script>fetch('{address}/script')</script>"
            f"<link rel=stylesheet href={address}/style><style>body{{background:url({address}/url)}}</style>"
        )
        run = make_run(tmp_path / "run", steps=10)
        records = [record | {"prompt": hostile, "response": hostile} for record in rollout_records(1)]
        run.save_rollouts(10, records, "eval_step")
        page = write_report([tmp_path / "run"], tmp_path / "report.html", title=hostile)
        dom = browse(page, tmp_path, "--dump-dom").stdout
        assert "How many" not in dom.split("Evaluation at step 10")[1].split("Evaluation at step 0")[0]
        assert Listener.hits == []
        # The listener works: the same text, unescaped, is fetched.
        (tmp_path / "open.html").write_text(f"<img src={address}/control>")
        browse(tmp_path / "open.html", tmp_path, "--dump-dom")
        assert Listener.hits == ["/control"]
    finally:
        server.shutdown()
        server.server_close()


PROBE = """<script>
const within = (root, selector) => [...root.querySelectorAll('*')].flatMap(element => [
  ...(element.matches(selector) ? [element] : []),
  ...(element.shadowRoot ? within(element.shadowRoot, selector) : [])]);
const point = () => {
  const tips = within(document, '.tip');
  if (tips.length) return document.title = JSON.stringify(tips[0].innerText.split('\\n'));
  for (const events of within(document, '.bk-events').slice(0, 1)) {
    const box = events.getBoundingClientRect(), at = { clientX: box.right - 16, clientY: box.top + 60 };
    const mouse = { ...at, bubbles: true, composed: true, isPrimary: true, pointerId: 1, pointerType: 'mouse' };
    for (const type of ['pointerenter', 'pointermove'])
      events.dispatchEvent(new PointerEvent(type, mouse));
  }
  setTimeout(point, 50);
};
point();
</script>"""


def tip(page: Path, folder: Path) -> list[str]:
    """What the first chart of a page shows under a pointer at its last step."""
    text = page.read_text().replace('http-equiv="Content-Security-Policy"', 'name="off"')
    probe = folder / "probe.html"
    probe.write_text(text.replace("</body>", PROBE + "</body>"))
    dom = browse(probe, folder, "--dump-dom", "--virtual-time-budget=10000").stdout
    return json.loads(html.unescape(dom.split("<title>")[1].split("</title>")[0]))


def test_values_are_shown_under_the_pointer_by_names_as_they_are(tmp_path):
    """On a page that moves the pointer itself to the last step."""
    name = "<img src=x>@x{safe}"
    make_run(tmp_path / "run", steps=20)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    escaped = json.dumps(name).replace("<", "\\u003c")
    page.write_text(page.read_text().replace('"name": "evaluation"', '"name": ' + escaped))
    shown = tip(page, tmp_path)
    assert shown[0] == "step 20"
    values = dict(line.rsplit(" ", 1) for line in shown[1:])
    assert list(values) == ["training", name, "evaluation, greedy"]
    assert float(values[name]) == pytest.approx(1.0, abs=0.01)
    assert float(values["evaluation, greedy"]) == pytest.approx(1.0, abs=0.01)


def test_the_tip_of_a_comparison_lists_only_runs_that_have_its_step(tmp_path):
    for name, steps in (("short", 10), ("long", 100)):
        make_run(tmp_path / name, steps)
    for order in (("short", "long"), ("long", "short")):
        page = write_report([tmp_path / name for name in order], tmp_path / "report.html")
        assert tip(page, tmp_path) == ["step 100", "long 1"]


def test_the_tip_tells_values_of_its_step_unsmoothed_and_none_of_a_marker(tmp_path):
    run = RunRecorder(tmp_path / "run")
    for step in range(1, 21):
        run.log_step(step, {"reward_mean": step % 2})
    run.log_eval(15, {"eval_reward": 0.5})
    (tmp_path / "run" / "alarms.jsonl").write_text('{"step": 20, "signal": "gold", "since": 21}\n')
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert tip(page, tmp_path) == ["step 20", "training 0"]
    run.log_step(21, {"reward_mean": 1, "gold": 0.25})
    text = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    page.write_text(text.replace("data-chart='", "data-no='", 1))  # the second chart is the first one drawn
    assert tip(page, tmp_path) == ["step 21", "reward, training 1", "gold, training 0.25"]
