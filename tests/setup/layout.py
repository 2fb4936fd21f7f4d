"""This module says where things lie in the checkout and in `.build/`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    root: Path

    @property
    def build(self) -> Path:
        return self.root / ".build"

    @property
    def tools(self) -> Path:
        """A virtual environment with uv and, where the machine has no Go, with Go."""
        return self.build / "tools"

    @property
    def uv(self) -> Path:
        return self.tools / "bin" / "uv"

    @property
    def localcluster(self) -> Path:
        return self.build / "bin" / "localcluster"

    @property
    def images(self) -> Path:
        """Return the list that names, for each image, what the local cluster runs."""
        return self.build / "images.yaml"

    @property
    def model(self) -> Path:
        """Return the model that the demo and the end-to-end tests start from."""
        return self.build / "models" / "arithmetic"

    @property
    def trained_model(self) -> Path:
        """A public model in bfloat16."""
        return self.build / "models" / "smollm2"

    @property
    def wheels(self) -> Path:
        return self.build / "wheels"

    @property
    def logs(self) -> Path:
        return self.build / "log"

    def environment(self, name: str) -> Path:
        return self.build / "env" / name

    def python(self, name: str) -> Path:
        return self.environment(name) / "bin" / "python"


CHECKOUT = Layout(Path(__file__).resolve().parents[2])
