"""`make demo`: a real server on this machine's CPU, eight invoice pages, and what further questions about them cost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from prism_server.bench.client import Answer, AnswerFailed, Client, user_message
from prism_server.bench.demo_script import MAX_ANSWER_TOKENS, PAGE, Cost, Step, script, warm_up
from prism_server.bench.report import table
from prism_server.bench.server_process import ServerProcess, StartProgress, cpu_threads
from prism_server.bench.terminal import Terminal
from prism_server.capacity.units import MIB
from prism_server.cli_support import ArgumentParser, console_script

FAILED_EXIT_CODE = 1
SERVER = {
    "model.path": "demo",
    "model.device": "cpu",
    "model.threads": str(cpu_threads()),
    "kv.memory_bytes": str(256 * MIB),
}


@console_script("prism-demo")
def main(argv: Sequence[str]) -> int:
    ArgumentParser("python -m prism_server.bench.demo", "Show what a repeated picture costs.").parse_strictly(argv)
    terminal = Terminal()
    try:
        return run(terminal)
    except AnswerFailed as failed:
        terminal.bad(f"the demo failed: {failed}")
        return FAILED_EXIT_CODE


def run(terminal: Terminal) -> int:
    """0 if every answer was right, every cost as promised, and the server ended in order."""
    steps = script()
    terminal.title("Prism: eight invoice pages, and eight questions about them")
    terminal.say("A real server, the bundled demo model, this machine's CPU. Everything goes through HTTP.\n")
    with ServerProcess(SERVER, lambda progress: _show_start(terminal, progress)) as server:
        terminal.done(f"prism-serve is ready on {server.api_url} after {server.ready_after_s:.1f} s")
        answers = asyncio.run(_ask(server.api_url, steps, terminal))
        exit_code = server.stop()
    terminal.say(_costs(steps, answers))
    terminal.say(
        "\nTime to first token is what the client saw. A picture that had nothing to do with the pages went first, so\n"
        "that no request pays for the first use of an operator."
    )
    return _verdict(steps, answers, exit_code, terminal)


async def _ask(url: str, steps: Sequence[Step], terminal: Terminal) -> list[Answer]:
    async with Client(url) as client:
        warm = warm_up()
        await client.chat([user_message(warm.pictures, warm.turn.question)], max_tokens=MAX_ANSWER_TOKENS)
        num_bytes = sum(map(len, steps[0].pictures))
        terminal.say(
            f"The pages: {len(steps[0].pages)} PNGs of {PAGE.width} x {PAGE.height} pixels, {PAGE.num_tokens} tokens "
            f"each, {num_bytes / 1e3:.0f} kB together.\n"
        )
        return [await _show(client, number, step, terminal) for number, step in enumerate(steps, 1)]


async def _show(client: Client, number: int, step: Step, terminal: Terminal) -> Answer:
    """One request, its answer as it streams in, and where its time went."""
    terminal.heading(f"{number}  {step.title}")
    terminal.say(f"   {step.turn.question}")
    terminal.write("   ")
    message = user_message(step.pictures, step.turn.question)
    answer = await client.chat([message], on_text=terminal.write, max_tokens=MAX_ANSWER_TOKENS)
    terminal.write("\n")
    engine = answer.timings
    tokens = answer.usage.completion_tokens
    later_ms = (answer.total_ms - answer.first_token_ms) / max(1, tokens - 1)
    terminal.faint(
        f"   first token {answer.first_token_ms:.0f} ms (queue {engine.queue_ms:.0f}, decode {engine.media_ms:.0f}, "
        f"encode and prefill {engine.prefill_ms:.0f}), {tokens} tokens in {answer.total_ms:.0f} ms, "
        f"{later_ms:.0f} ms a token"
    )
    if answer.text == step.turn.answer:
        terminal.good("   right\n")
    else:
        terminal.bad(f"   wrong: the pages say {step.turn.answer}\n")
    return answer


def _costs(steps: Sequence[Step], answers: Sequence[Answer]) -> str:
    """The table: what each request cost, what it was spared, how much sooner its first token came."""
    above = ["", "pictures", "pictures", "media tokens", "text tokens", "tokens", "first", ""]
    header = ["request", "decoded", "encoded", "prefilled", "prefilled", "reused", "token", ""]
    first_ms = answers[0].first_token_ms
    rows: list[Sequence[object]] = [header]
    for number, (step, answer) in enumerate(zip(steps, answers, strict=True), 1):
        usage = answer.usage
        rows.append(
            [
                f"{number}  {step.title}",
                usage.decoded_items,
                usage.encoded_items,
                usage.prefilled_media_tokens,
                usage.prefilled_tokens - usage.prefilled_media_tokens,
                usage.cached_tokens,
                f"{answer.first_token_ms:.0f} ms",
                "" if number == 1 else f"{first_ms / answer.first_token_ms:.1f} x sooner",
            ]
        )
    return table(above, rows)


def _verdict(steps: Sequence[Step], answers: Sequence[Answer], exit_code: int, terminal: Terminal) -> int:
    problems = [
        f"request {number}: {problem}"
        for number, (step, answer) in enumerate(zip(steps, answers, strict=True), 1)
        for problem in problems_of(step, answer)
    ]
    if exit_code != 0:
        problems.append(f"prism-serve ended with exit code {exit_code}")
    for problem in problems:
        terminal.bad(problem)
    if not problems:
        terminal.good(f"\nAll {len(steps)} answers are right. What had been seen was never decoded or encoded again.")
    return FAILED_EXIT_CODE if problems else 0


def problems_of(step: Step, answer: Answer) -> list[str]:
    """What was not as the step promised; empty if all was well."""
    problems = []
    if answer.text != step.turn.answer:
        problems.append(f"answered {answer.text!r}, the pages say {step.turn.answer!r}")
    if (cost := Cost.of(answer.usage)) != step.cost:
        problems.append(f"cost {cost}, but should have cost {step.cost}")
    return problems


def _show_start(terminal: Terminal, progress: StartProgress) -> None:
    sizes = f", {progress.done / MIB:.0f} of {progress.total / MIB:.0f} MiB" if progress.total else ""
    terminal.progress(f"prism-serve: {progress.stage}", f"{sizes}, {progress.elapsed_s:.1f} s")


if __name__ == "__main__":
    sys.exit(main(None))
