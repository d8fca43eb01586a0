"""Take the pictures of docs/guides/playground.md from a server that runs; on a quiet machine, or its speeds mislead.

outrider serve smollm2-135m &
python scripts/playground_pictures.py http://127.0.0.1:8000/ docs/images
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

RIVERS = "Name three rivers of France."


def main(url: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        wide = opened(browser, url, viewport={"width": 1280, "height": 880}, device_scale_factor=1.5)
        letter = chat(wide, folder / "playground-chat.png")
        race(wide, letter, folder / "playground-race.png")
        narrow = {"viewport": {"width": 360, "height": 720}, "device_scale_factor": 2, "color_scheme": "dark"}
        phone(opened(browser, url, has_touch=True, is_mobile=True, **narrow), folder / "playground-phone.png")
        browser.close()


def opened(browser: Browser, url: str, **look: object) -> Page:
    page = browser.new_context(**look).new_page()
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


def ended(page: Page) -> None:
    page.wait_for_selector("#stop", state="visible")
    page.wait_for_selector("#send", state="visible", timeout=120_000)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)


def chat(page: Page, path: Path) -> str:
    """The second answer, when the pace has learned what a pass costs; what was asked."""
    for _ in range(2):
        page.click("#fresh")
        page.get_by_role("button", name="Correct a letter").click()
        page.keyboard.press("Enter")
        ended(page)
    kept = page.locator(".token.kept")
    kept.nth(kept.count() // 2).hover()
    page.screenshot(path=path)
    return page.locator(".asked").inner_text()


def race(page: Page, letter: str, path: Path) -> None:
    """Again the second."""
    page.get_by_role("tab", name="Race").click()
    for _ in range(2):
        page.fill("#prompt", letter)
        page.keyboard.press("Enter")
        ended(page)
    page.fill("#prompt", letter.partition("\n")[0])
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.screenshot(path=path)
    print(page.locator("#verdict").inner_text())


def phone(page: Page, path: Path) -> None:
    page.fill("#prompt", RIVERS)
    page.tap("#send")
    ended(page)
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_timeout(200)
    page.screenshot(path=path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
