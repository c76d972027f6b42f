"""The rollout browser in Debian's Chromium, opened from a disk as users open it."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.host.unicode import readable
from megarl.record.metrics import RunPaths
from megarl.record.rollouts import write_rollouts
from megarl.report import rollouts, write_report
from tests.helpers.beside import install_beside
from tests.helpers.hostile_texts import escaped, hostile_texts
from tests.helpers.recorded_run import evil, forked, talk, write_recorded_run, write_validation

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Playwright is installed beside the environment: it brings a Node of 50 MB for these tests alone."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.fail("found no chromium, expected Debian's; run apt-get install -y chromium")
    site = install_beside("browser.txt", tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            yield browser
            browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page and wait for its first sample. Whatever it loads is in its `loaded`; no error may be left."""
    contexts, errors = [], []

    def opened(path: Path, link: str = "", *, width: int = 1280, scheme: str = "light") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.loaded = []
        page.on("request", lambda request: page.loaded.append(request.url))
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(f"{path.as_uri()}{link}")
        page.wait_for_selector("#sample article", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """3 steps of 4 prompts with 4 samples, of which half are right; a conversation; a validation of 5 prompts."""
    paths = write_recorded_run(tmp_path_factory.mktemp("runs") / "sums", steps=3, prompts=4)
    write_rollouts(paths.rollouts(4), [talk(4)])
    write_validation(paths, 3, range(5), correct=True)
    write_report(paths.root)
    return paths


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """The report of two runs of the same prompts, of which the second had hints."""
    root = tmp_path_factory.mktemp("pair")
    paths = write_recorded_run(root / "plain", steps=3, prompts=4)
    other = write_recorded_run(root / "hinted", steps=2, prompts=4, hints=True, seed=1)
    write_report(paths.root, [other.root])
    return paths


def browser_of(paths: RunPaths) -> Path:
    return paths.report_files / "rollouts.html"


def count(page: Any, text: str) -> None:
    """Wait until the list says how many samples it has."""
    page.wait_for_function("text => document.getElementById('count').textContent.startsWith(text)", arg=text)


def backgrounds(page: Any) -> list[str]:
    found = page.eval_on_selector_all(".t", "spans => spans.map(span => span.getAttribute('style') ?? '')")
    return [re.sub(r".*var\(--(\w+)\) (\d+)%.*", r"\1 \2", style) for style in found]


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_filters_narrow_the_list(visit: Callable[..., Any], sums: RunPaths) -> None:
    # 48 samples of training of which 24 are right, the conversation (right), and 10 answers of a validation (right).
    page = visit(browser_of(sums))
    count(page, "59 samples · 59 % right")
    page.click("summary")
    page.select_option("[name=verdict]", "wrong")
    count(page, "24 of 59 samples · 0 % right")
    page.fill("[name=step_min]", "2")
    page.fill("[name=step_max]", "2")
    count(page, "8 of 59 samples")
    assert "step_min=2" in page.url
    page.click("text=Clear filters")
    count(page, "59 samples")
    for field, value, left in (
        ("in_phase", "validation, greedy", 5),
        ("source", "calculator", 1),
        ("reward_max", "0.5", 24),
        ("reward_min", "0.75", 35),
        ("length_max", "6", 10),
        ("advantage_min", "0.6", 24),
        ("text", "12+10=?", 4),
        ("text", "CALC 37", 1),
        ("text", "nowhere", 0),
    ):
        setter = page.select_option if field in ("in_phase", "source") else page.fill
        setter(f"[name={field}]", value)
        count(page, f"{left} of 59 samples")
        setter(f"[name={field}]", "")
        count(page, "59 samples")


def test_the_list_is_sorted_and_has_pages(visit: Callable[..., Any], sums: RunPaths) -> None:
    page = visit(browser_of(sums))
    count(page, "59 samples")
    assert page.locator("#rows a").count() == 50
    page.click("text=Next ›")
    assert page.locator("#place").inner_text() == "51 to 59"
    assert page.locator("#rows a").count() == 9
    page.select_option("[name=sort]", "-step")
    page.wait_for_function("() => document.querySelector('#rows a').textContent.includes('step 4')")
    page.select_option("[name=sort]", "length")
    page.wait_for_function("() => document.querySelector('#rows a').textContent.includes('6 tokens')")


def test_tokens_have_the_colour_of_what_is_chosen(visit: Callable[..., Any], sums: RunPaths, pair: RunPaths) -> None:
    """Of the conversation: the root of log-prob −0.5 of the full colour's −4, no mismatch, advantage 0.5 of 1."""
    page = visit(browser_of(sums), "#step=4&sample=calculator:0/0")
    # Only what the policy wrote, 20 and 9 characters; the environment's reply is read, and no token.
    assert backgrounds(page) == ["deep 35"] * 29
    assert page.locator("pre.read").inner_text() == "1776"
    assert "policy, turn 2, reward +1" in page.locator("article").inner_text()
    for color, found in (("advantage", "up 50"), ("mismatch", ""), ("none", "")):
        page.check(f"input[value={color}]", force=True)
        page.wait_for_selector(f"input[value={color}]:checked", state="attached")
        page.wait_for_function("want => document.querySelector('.t').style.background.includes(want)", arg=found[-3:])
        assert backgrounds(page) == [found] * 29
    page.hover(".t >> nth=0")
    told = page.locator("#token").inner_text()
    assert told == 'token "c" · log-prob −0.5 (60.7 %) · engine − trainer 0 nats · advantage +0.5'
    assert page.locator("input[value=signal]").count() == 0
    page = visit(browser_of(pair), "#run=hinted&step=1&sample=sums:0/0")
    page.check("input[value=signal]", force=True)
    page.wait_for_selector("input[value=signal]:checked", state="attached")
    assert {color.split()[0] for color in backgrounds(page) if color} == {"up", "down"}


def test_a_conversation_that_forks_is_shown_by_branches_and_by_paths(visit: Callable[..., Any], tmp_path: Path) -> None:
    paths = write_recorded_run(tmp_path / "run", steps=1, prompts=1)
    write_rollouts(paths.rollouts(2), [forked(2), talk(2)])
    write_report(paths.root)
    page = visit(browser_of(paths), "#step=2&sample=forks:0/0")
    article = page.locator("article")
    assert "4 branches" in article.inner_text()
    summaries = [summary.inner_text() for summary in article.locator("summary").all()]
    assert summaries == [
        "Branch 1 after the prompt · 7 tokens",
        "Branch 2 after 7 tokens of the prompt · 19 tokens",
        "Branch 3 with a prompt of its own · 6 tokens",
        "Branch 4 after 4 of 9 tokens of turn 2, branch 2 · 15 tokens",
    ]
    # The policy's 7, 9, 2 and 6 tokens.
    assert backgrounds(page) == ["deep 35"] * 24
    page.click("[data-branch='4'] summary")
    assert not page.locator("[data-branch='4'] pre >> nth=0").is_visible()
    page.click("[aria-label='to branch 4']")
    assert page.locator("[data-branch='4'] pre >> nth=0").is_visible()
    page.click(".paths label:has-text('4')")
    page.wait_for_function("() => !document.querySelector('.branch')")
    texts = [pre.inner_text() for pre in article.locator("pre").all()]
    assert texts == ["calc=1776", "####", "once more", " 1776!"]
    assert "policy, turn 2, 4 of 9 tokens" in article.inner_text()
    assert backgrounds(page) == ["deep 35"] * 10
    # The path stays chosen; other samples look as ever.
    page.keyboard.press("j")
    page.wait_for_function("() => document.querySelector('h2').textContent === 'calculator:0/0'")
    assert page.locator(".paths, .branch").count() == 0
    page.keyboard.press("k")
    page.wait_for_selector(".paths")
    assert page.locator(".branch").count() == 0
    assert fits(visit(browser_of(paths), "#step=2&sample=forks:0/0", width=390))


def test_keys_and_links_lead_to_samples(visit: Callable[..., Any], sums: RunPaths) -> None:
    page = visit(browser_of(sums), "#step=2&sample=sums:5/1")
    current = page.locator("#rows [aria-current]")
    assert page.locator("h2").inner_text() == "sums:5/1"
    assert current.count() == 1
    page.keyboard.press("j")
    page.wait_for_function("() => document.querySelector('h2').textContent === 'sums:5/2'")
    assert page.url.endswith("#step=2&sample=sums%3A5%2F2")
    for _ in range(2):
        page.keyboard.press("k")
    page.wait_for_function("() => document.querySelector('h2').textContent === 'sums:5/0'")
    page.keyboard.press("/")
    page.keyboard.type("jk")
    assert page.input_value("[name=text]") == "jk"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    page.focus("pre.response")
    page.keyboard.press("ArrowRight")
    assert page.locator("#token").inner_text().startswith('token "1" · log-prob −')
    page.evaluate("location.hash = '#step=9&sample=sums:5/1'")
    page.wait_for_selector("#problem:visible")
    assert "No recorded sample is step 9, sums:5/1." in page.locator("#problem").inner_text()


def test_only_the_pieces_that_are_looked_at_are_loaded(
    visit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "PIECE_CHARS", 1)  # a piece for every sample
    paths = write_recorded_run(tmp_path / "run", steps=20, prompts=5)
    write_report(paths.root)
    page = visit(browser_of(paths))

    def loaded(kind: str) -> int:
        return sum(f"/{kind}_" in url for url in page.loaded)

    page.wait_for_function("() => ![...document.querySelectorAll('.answer')].some(each => each.textContent === '…')")
    assert (loaded("texts"), loaded("tokens")) == (50, 1)
    page.click("text=Next ›")
    page.wait_for_function("() => ![...document.querySelectorAll('.answer')].some(each => each.textContent === '…')")
    assert (loaded("texts"), loaded("tokens")) == (100, 1)
    page.fill("[name=text]", "99+12=?")
    count(page, "0 of 400 samples")
    page.fill("[name=text]", "19+10=?")
    count(page, "4 of 400 samples")
    kept = page.evaluate("[...rollouts.pieces.keys()].filter(name => name.startsWith('texts')).length")
    assert kept == 48


def test_a_missing_piece_and_a_new_report_are_told(visit: Callable[..., Any], tmp_path: Path) -> None:
    paths = write_recorded_run(tmp_path / "run", steps=3, prompts=4)
    write_report(paths.root)
    page = visit(browser_of(paths))
    write_report(paths.root)
    page.evaluate("rollouts.pieces.clear()")
    page.keyboard.press("j")
    page.wait_for_selector("#problem:visible")
    assert "written anew" in page.locator("#problem").inner_text()
    page = visit(browser_of(paths))
    (paths.report_files / "tokens_00000.js").unlink()
    page.evaluate("rollouts.pieces.clear()")
    page.keyboard.press("j")
    page.wait_for_selector("#problem:visible")
    assert "tokens_00000.js is missing" in page.locator("#problem").inner_text()


def test_texts_of_models_stay_texts(visit: Callable[..., Any], tmp_path: Path) -> None:
    paths = write_recorded_run(tmp_path / "run", steps=1, prompts=1)
    write_rollouts(paths.rollouts(1), [evil(1)])
    write_report(paths.root)
    page = visit(browser_of(paths))
    page.wait_for_function("() => document.querySelector('#rows .question').textContent.includes('<img')")
    page.hover(".t >> nth=0")
    assert page.title() == "Rollouts · run"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 6
    assert "␇" in page.locator("pre.response").inner_text()
    assert all(url.startswith(paths.report_files.as_uri()) for url in page.loaded)
    # What is hidden looks as it does in the report.
    texts = [readable(text) for text in hostile_texts(10_000)]
    looks = page.evaluate("texts => texts.map(pictured)", texts)
    assert looks == [escaped(text, kept="\n\t", pictures=True) for text in texts]


def test_pages_run_and_load_nothing_but_their_own(chromium: Any, tmp_path: Path) -> None:
    """What would happen if a text became more than a text: nothing, by the policy of each page."""
    paths = write_recorded_run(tmp_path / "run", steps=1, prompts=1)
    write_report(paths.root)
    evil_parts = (
        "<script>document.title = 'owned'</script><img src='x.png' onerror=\"document.title = 'owned'\">"
        "<style>body { display: none }</style><iframe src='frame.html'></iframe><script src='data:,owned()'></script>"
    )
    for path in (paths.report_html, browser_of(paths)):
        page = chromium.new_page()
        loaded: list[str] = []
        page.on("requestfinished", lambda request, loaded=loaded: loaded.append(request.url))
        for name in ("x.png", "frame.html"):
            path.with_name(name).touch()
        path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{evil_parts}</body>"), encoding="utf-8")
        page.goto(path.as_uri())
        page.wait_for_load_state()
        assert page.title() != "owned"
        assert page.locator("h1").is_visible()
        assert not [url for url in loaded if "x.png" in url or "frame" in url]
        # The page's own styles hold.
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(247, 248, 250)"
        page.close()


def test_dark_and_light_follow_the_system_and_the_switch(visit: Callable[..., Any], sums: RunPaths) -> None:
    def background(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark, light = "rgb(20, 23, 27)", "rgb(247, 248, 250)"
    assert background(visit(browser_of(sums))) == light
    page = visit(browser_of(sums), scheme="dark")
    assert background(page) == dark
    page.click("text=Theme: auto")
    assert background(page) == light
    page.reload()
    assert background(page) == light
    page.click("text=Theme: light")
    assert background(page) == dark


def test_on_a_narrow_screen_list_and_sample_take_turns(
    visit: Callable[..., Any], sums: RunPaths, pair: RunPaths
) -> None:
    page = visit(browser_of(sums), width=390)
    assert not page.locator("#sample").is_visible()
    page.click("summary")
    assert fits(page)
    page.click("summary")
    page.click("#rows a >> nth=0")
    page.wait_for_selector("#sample:visible")
    assert not page.locator("#rows").is_visible()
    assert fits(page)
    page.click("text=‹ Samples")
    assert page.locator("#rows").is_visible()
    page = visit(browser_of(pair), "#run=hinted&step=1&sample=sums:0/0", width=390)
    assert page.locator("article").count() == 2
    assert fits(page)


def test_runs_stand_side_by_side_for_the_same_prompt(visit: Callable[..., Any], pair: RunPaths) -> None:
    page = visit(browser_of(pair), "#run=hinted&step=2&sample=sums:4/1")
    articles = page.locator("article")
    assert [article.locator("h3").inner_text() for article in articles.all()] == ["plain", "hinted"]
    # The same prompt, step and sample of the other run: (2 + 1 + 0) is odd.
    assert ["wrong · reward 0 · step 2" in article.inner_text() for article in articles.all()] == [True, True]
    left, right = (article.bounding_box() for article in articles.all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    page.click("article >> nth=0 >> [aria-label*='sample 2']")
    page.wait_for_function("() => document.querySelector('article').className === 'right'")
    # The second run had no third step.
    page = visit(browser_of(pair), "#run=plain&step=3&sample=sums:8/0")
    assert "No sample of this prompt was recorded." in page.locator("article").nth(1).inner_text()


def test_every_control_has_a_name(visit: Callable[..., Any], pair: RunPaths) -> None:
    page = visit(browser_of(pair))
    page.click("summary")
    nameless = """controls => controls.filter(each => !(each.getAttribute('aria-label') || each.textContent.trim()
        || [...(each.labels ?? [])].some(label => label.textContent.trim()))).map(each => each.outerHTML)"""
    assert page.eval_on_selector_all("button, input, select, a, summary, pre, nav, section", nameless) == []
    assert page.eval_on_selector_all("[name=source], [name=verdict]", "all => all.every(each => each.labels.length)")


def test_the_report_leads_to_the_samples_of_a_step(visit: Callable[..., Any], sums: RunPaths, chromium: Any) -> None:
    page = chromium.new_context().new_page()
    page.goto(sums.report_html.as_uri())
    page.click("table a >> nth=0")
    count(page, "16 of 59 samples")
    page.context.close()


def test_a_hundred_thousand_samples_open(
    visit: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and times are printed; what is loaded on opening is bounded."""
    paths = write_recorded_run(tmp_path / "run", steps=100, prompts=250)
    began = time.monotonic()
    write_report(paths.root)
    files = {path.name: path.stat().st_size for path in paths.report_files.glob("*.js")}
    texts, tokens = (sum(size for name, size in files.items() if name.startswith(kind)) for kind in ("texts", "tokens"))
    lines = [f"written in {time.monotonic() - began:.1f} s"]
    lines.append(f"index {files['index.js'] / 2**20:.1f} MiB, texts {texts / 2**20:.0f}, tokens {tokens / 2**20:.0f}")
    began = time.monotonic()
    page = visit(browser_of(paths))
    count(page, "100,000 samples")
    lines.append(f"opened in {time.monotonic() - began:.2f} s, {len(page.loaded)} files of {len(files)}")
    assert len(page.loaded) <= 12
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def heap(when: str) -> None:
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        lines.append(f"heap {when}: {metrics['JSHeapUsedSize'] / 2**20:.0f} MiB")

    heap("after opening")
    for name, act, found in (
        ("filter", lambda: page.evaluate("document.querySelector('[name=reward_min]').value = 1"), "50,000 of"),
        ("sort", lambda: page.select_option("[name=sort]", "-mismatch"), "50,000 of"),
        ("search", lambda: page.fill("[name=text]", "10+10=?"), "8 of"),
    ):
        began = time.monotonic()
        act()
        page.dispatch_event("[name=text]", "input")
        page.wait_for_timeout(160)
        count(page, found)
        lines.append(f"{name}: {time.monotonic() - began:.2f} s")
    heap("after a search of everything")
    with capsys.disabled():
        print("", *lines, sep="\n")
