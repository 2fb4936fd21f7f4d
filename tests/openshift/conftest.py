"""An API server with the chart's policies, for pods as OpenShift's admission leaves them."""

from __future__ import annotations

from integration.conftest import access, operators

__all__ = ["access", "operators"]
