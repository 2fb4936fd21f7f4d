"""Shows a job for as long as something else goes on: in place on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live

from colocated_rl_cli.cluster.following import JobWatch
from colocated_rl_cli.draw.figures import Line
from colocated_rl_cli.draw.view import frame, plain_line

EVERY_S = 0.5


class Terminal(Console):
    """Where commands print what is more than text."""

    def on_broken_pipe(self) -> None:
        """That whoever reads has had enough is nothing to exit with 1 for."""
        raise BrokenPipeError


@asynccontextmanager
async def shown(watch: JobWatch, console: Console, *, screen: bool) -> AsyncIterator[None]:
    """While the block runs. screen: use all of the terminal, and give it back as it was."""
    if not console.is_terminal:

        def print_line(line: Line) -> None:
            try:
                _print_plain(console, line)
            except BrokenPipeError:
                watch.end()

        watch.on_line = print_line
        yield
        return
    with Live(console=console, auto_refresh=False, screen=screen) as live:

        def draw() -> None:
            trouble = str(watch.trouble) if watch.trouble else None
            live.update(frame(watch.job, watch.lines, now=time.time(), trouble=trouble), refresh=True)

        async def draw_on() -> None:
            while console.is_terminal:  # one that is gone is none any more
                draw()
                await asyncio.sleep(EVERY_S)

        looking = asyncio.current_task()
        drawing = asyncio.create_task(draw_on(), name="live/draw")

        def end_with_it(drawn: asyncio.Task[None]) -> None:
            if not drawn.cancelled() and looking is not None:
                looking.cancel()  # nobody looks any more

        drawing.add_done_callback(end_with_it)
        try:
            yield
            draw()
        finally:
            drawing.cancel()


def _print_plain(console: Console, line: Line) -> None:
    if (text := plain_line(line)) is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
