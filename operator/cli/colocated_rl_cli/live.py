"""Show a job while a block runs: redrawn in place on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from colocated_rl_api.logs import printable
from colocated_rl_cli.cluster.following import JobWatch
from colocated_rl_cli.draw.figures import Line
from colocated_rl_cli.draw.view import frame, plain_line

EVERY_S = 0.5


class Terminal(Console):
    """Prints the styled output of commands. Of what it is given, nothing but the style acts on it, and no markup in a
    text: names come from logs.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise instead of exiting with 1, because a reader that closes the pipe is no failure."""
        raise BrokenPipeError


@asynccontextmanager
async def shown(watch: JobWatch, console: Console, *, screen: bool) -> AsyncIterator[None]:
    """Show the job while the block runs. screen: use the whole terminal, and restore it afterwards."""
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
            while console.is_terminal:  # False once the terminal is gone
                draw()
                await asyncio.sleep(EVERY_S)

        caller = asyncio.current_task()
        drawing = asyncio.create_task(draw_on(), name="live/draw")

        def cancel_caller(drawn: asyncio.Task[None]) -> None:
            if not drawn.cancelled() and caller is not None:
                caller.cancel()  # nobody can see the job any more

        drawing.add_done_callback(cancel_caller)
        try:
            yield
            draw()
        finally:
            drawing.cancel()


def _print_plain(console: Console, line: Line) -> None:
    if (text := plain_line(line)) is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
