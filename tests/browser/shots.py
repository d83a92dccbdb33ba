"""Screenshots of a service's playground: `python -m tests.browser.shots URL FOLDER [PROMPT]`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DESKTOP, PHONE = (1280, 900), (360, 800)
SHOTS = {
    "playground-desktop": (DESKTOP, "light"),
    "playground-desktop-dark": (DESKTOP, "dark"),
    "playground-phone": (PHONE, "light"),
    "playground-phone-dark": (PHONE, "dark"),
}
RUN_TIMEOUT_MS = 120_000


def main(url: str, folder: Path, prompt: str = "") -> None:
    """After one run each, whole pages; an error on the page is an error here."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, ((width, height), scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(url)
            _shoot(page, folder / f"{name}.png", prompt)
            page.close()
        browser.close()


def _shoot(page: Any, path: Path, prompt: str) -> None:
    page.wait_for_selector("#model option", state="attached")
    if prompt:
        page.fill("#prompt", prompt)
    page.click("#run")
    page.wait_for_selector("#run:not([disabled])", timeout=RUN_TIMEOUT_MS)
    if error := page.inner_text("#error"):
        raise SystemExit(error)
    page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
