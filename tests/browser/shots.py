"""Screenshots: `python -m tests.browser.shots FOLDER --url URL --trace FILE.html`, either or both.

The playground of a running service after one run of it, and the page of `paceline trace --html`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DESKTOP, PHONE, TRACE = (1280, 900), (360, 800), (1280, 1100)
SHOTS = {
    "playground-desktop": (DESKTOP, "light"),
    "playground-desktop-dark": (DESKTOP, "dark"),
    "playground-phone": (PHONE, "light"),
    "playground-phone-dark": (PHONE, "dark"),
}
RUN_TIMEOUT_MS = 120_000


def main(
    folder: Path, url: str, prompt: str, method: str, only: list[str] | None, trace: Path | None
) -> None:
    """An error on a page is an error here."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (size, scheme) in SHOTS.items():
            if not url or (only and name not in only):
                continue
            page = _open(browser, url, size, scheme)
            _run(page, prompt, method)
            page.screenshot(path=folder / f"{name}.png", full_page=True)
            page.close()
        for scheme in ("light", "dark") if trace else ():
            page = _open(browser, trace.resolve().as_uri(), TRACE, scheme)
            page.screenshot(path=folder / f"trace{'-dark' * (scheme == 'dark')}.png")
            page.close()
        browser.close()


def _open(browser: Any, url: str, size: tuple[int, int], scheme: str) -> Any:
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    return page


def _run(page: Any, prompt: str, method: str) -> None:
    page.wait_for_selector("#model option", state="attached")
    if prompt:
        page.fill("#prompt", prompt)
    if method:
        page.click("summary")
        page.select_option("#method", method)
        page.click("summary")
    page.click("#run")
    page.wait_for_selector("#run:not([disabled])", timeout=RUN_TIMEOUT_MS)
    if error := page.inner_text("#error"):
        raise SystemExit(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="", help="the service whose playground is shown")
    parser.add_argument("--prompt", default="", help="in place of the page's own")
    parser.add_argument("--method", default="", help="speculation.method")
    parser.add_argument("--only", nargs="+", choices=SHOTS, help="of the playground")
    parser.add_argument("--trace", type=Path, help="a page of `paceline trace --html`")
    main(**vars(parser.parse_args()))
