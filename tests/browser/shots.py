"""Screenshots of a service's playground: `python -m tests.browser.shots URL FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SHOTS = {
    "playground-desktop": ((1280, 900), "light"),
    "playground-dark": ((1280, 900), "dark"),
    "playground-phone": ((360, 800), "light"),
}


def main(url: str, folder: Path) -> None:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, ((width, height), scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(url)
            page.wait_for_selector("#model option", state="attached")
            page.click("#run")
            page.wait_for_selector("#run:not([disabled])", timeout=120_000)
            page.screenshot(path=folder / f"{name}.png", full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
