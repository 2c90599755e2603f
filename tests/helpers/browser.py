"""Chromium for the tests of HTML pages: python tests/helpers/browser.py check | install (Debian, root)."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "chromium"
BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LAYOUT_SCRIPT = """<script>
function look() {
  document.querySelectorAll('details').forEach(one => { one.open = true; });
  const inside = box => box.left >= -1 && box.right <= innerWidth + 1;
  const name = one => one.tagName + '.' + (one.getAttribute('class') || '') + ': ' + one.textContent.slice(0, 40);
  const wide = [...document.body.querySelectorAll('*')].filter(one =>
    !one.closest('.scroll *, svg *, .skip') && !inside(one.getBoundingClientRect())).map(name);
  const cut = [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1).map(box =>
    box.getAttribute('aria-label'));
  const clipped = [], overlapping = [], sizes = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].filter(one => one.textContent.trim());
    const boxes = texts.map(one => one.getBoundingClientRect());
    texts.forEach((one, place) => {
      const box = boxes[place];
      sizes.push(parseFloat(getComputedStyle(one).fontSize) * frame.width / svg.viewBox.baseVal.width);
      if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2)
        clipped.push(name(one));
      if (/rotate\\((?!-?0 )/.test(one.getAttribute('transform') || '')) return;
      for (let other = place + 1; other < texts.length; other++) {
        const next = boxes[other], slanted = /rotate\\((?!-?0 )/.test(texts[other].getAttribute('transform') || '');
        if (!slanted && Math.min(box.right, next.right) - Math.max(box.left, next.left) > 1 &&
            Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top) > 3)
          overlapping.push(name(one) + ' / ' + name(texts[other]));
      }
    });
  }
  const told = {width: innerWidth, scrolled: document.documentElement.scrollWidth, wide, cut, clipped, overlapping,
    smallest: sizes.length ? Math.min(...sizes) : null, figures: document.querySelectorAll('svg').length,
    background: getComputedStyle(document.body).backgroundColor, requests: performance.getEntriesByType('resource').map(one => one.name)};
  const out = parent.document.createElement('script');
  out.type = 'application/json'; out.id = 'told'; out.textContent = JSON.stringify(told).replace(/</g, '\\\\u003c');
  parent.document.body.append(out);
}
look();
</script>"""


def find_browser() -> str | None:
    """Return the path of an installed browser, or None."""
    return next((path for name in BROWSER_NAMES if (path := shutil.which(name))), None)


def install_browser() -> None:
    """Install Chromium unless a browser is installed."""
    if find_browser() is None:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "--no-install-recommends", PACKAGE]):
            subprocess.run(command, env=environment, check=True)


def run_browser(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the browser headless with a temporary profile."""
    browser = find_browser()
    assert browser is not None
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                   "--no-first-run", "--disable-background-networking", "--enable-logging=stderr", *words]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def check_layout(page: Path, *, width: int) -> dict[str, Any]:
    """Open a page in a frame of a given width, and return what is wrong with the layout.

    A frame is needed because a browser window is at least 500 pixels wide. The result lists elements that are too wide, clipped or
    overlapping, tables that are `cut` (wider than their box), the lines of the browser's `console`, and the `requests` of the page
    for other files.
    """
    copy = page.with_name(f"{page.stem}-looked-at.html")
    inner = html.escape(page.read_text().replace("</body>", f"{_LAYOUT_SCRIPT}</body>"))
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{inner}"></iframe>'
    copy.write_text(f"<!doctype html><html><body>{frame}</body></html>")
    done = run_browser("--window-size=1600,1000", "--dump-dom", copy.absolute().as_uri())
    answer = re.search(r'id="told">(.*?)</script>', done.stdout, re.DOTALL)
    assert answer, done.stderr
    return {**json.loads(answer[1]), "console": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install_browser()
    else:
        print(find_browser() or f"no browser: apt-get install {PACKAGE}")
        sys.exit(find_browser() is None)
