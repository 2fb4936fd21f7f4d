"""A Dockerfile as tests read it: stages, and what each of their instructions says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    name: str
    base: str  # another stage, or an image
    instructions: list[tuple[str, str]] = field(default_factory=list)  # RUN, COPY, ...; its words on one line

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.instructions if name == instruction]

    @property
    def entrypoint(self) -> list[str]:
        [words] = self.all("ENTRYPOINT")
        found: list[str] = json.loads(words)
        return found

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for words in self.all("ENV") for word in words.split())


@dataclass(frozen=True)
class Dockerfile:
    arguments: dict[str, str]  # before the first stage
    stages: dict[str, Stage]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        lines = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        arguments: dict[str, str] = {}
        stages: dict[str, Stage] = {}
        for line in re.sub(r"\\\n\s*", "", lines).splitlines():
            instruction, _, words = line.partition(" ")
            if instruction == "FROM":
                base, _, name = words.partition(" AS ")
                stage = stages[name] = Stage(name, base)
            elif stages and instruction:
                stage.instructions.append((instruction, words))
            elif instruction == "ARG":
                name, _, value = words.partition("=")
                arguments[name] = value
        return cls(arguments, stages)

    def image_of(self, name: str) -> str:
        """The image that a stage stands on."""
        base = self.stages[name].base
        if base in self.stages:
            return self.image_of(base)
        return re.sub(r"\$\{(\w+)\}", lambda found: self.arguments[found[1]], base)

    def inherited(self, name: str) -> list[Stage]:
        """A stage and those that it stands on, the first one first."""
        stage = self.stages[name]
        return [*(self.inherited(stage.base) if stage.base in self.stages else []), stage]
