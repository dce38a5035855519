"""What a browser's page does with a panel, without a browser: it hears the kernel's messages and sends its own."""

import time
from collections.abc import Callable
from typing import Any

from tests.kernel.kernels import TIMEOUT, Kernel

VIEW = "application/vnd.jupyter.widget-view+json"


class Page:
    """A page that shows a kernel's panels; `messages` are those that each panel was sent, `widgets` are all."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.widgets: dict[str, dict[str, Any]] = {}
        self.shown: list[str] = []
        self.messages: dict[str, list[dict[str, Any]]] = {}
        self.closed: list[str] = []
        kernel.listeners.append(self._receive)

    def _receive(self, message: dict[str, Any]) -> None:
        message_type, content = message["msg_type"], message["content"]
        if message_type == "comm_open" and "_esm" in content["data"].get("state", {}):
            self.widgets[content["comm_id"]] = content["data"]["state"]
            self.messages[content["comm_id"]] = []
        elif message_type == "display_data" and (view := content["data"].get(VIEW)) is not None:
            self.shown.append(view["model_id"])
        elif message_type == "comm_close":
            self.closed.append(content["comm_id"])
        elif message_type == "comm_msg" and content["comm_id"] in self.widgets:
            self._take(content["comm_id"], content["data"])

    def _take(self, comm: str, data: dict[str, Any]) -> None:
        if data["method"] == "update":
            self.widgets[comm].update(data["state"])
        if data["method"] != "custom":
            return
        self.messages[comm].append(data["content"])
        self.send({"do": "ack", "seq": data["content"]["seq"]}, comm)

    @property
    def panel(self) -> str:
        """The newest panel."""
        return next(reversed(self.widgets))

    def send(self, content: dict[str, Any], panel: str | None = None) -> None:
        """Send what a panel sends."""
        data = {"method": "custom", "content": content}
        self.kernel.send("comm_msg", {"comm_id": panel or self.panel, "data": data})

    def hello(self, panel: str | None = None, seq: int = 0) -> None:
        """Say that a panel is drawn."""
        self.send({"do": "hello", "view": "1", "seq": seq}, panel)

    def draw(self) -> None:
        """Draw the newest panel as soon as it is in a cell."""
        self.until_shown()
        self.hello()

    def until(self, happened: Callable[[], Any], timeout: float = TIMEOUT) -> None:
        """Hear messages until something has happened."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"not within {timeout:g} s; messages: {str(self.messages)[-3000:]}"
            self.kernel.receive(0.1)

    def until_shown(self, number: int = 1) -> str:
        """Hear messages until so many panels are in cells, which is when a page draws them; the newest."""
        self.until(lambda: len(self.shown) >= number)
        return self.panel

    def all_of(self, key: str, panel: str | None = None) -> list[Any]:
        """Everything that messages since the last reset say under a key, lists joined."""
        messages = self.messages[panel or self.panel]
        begin = max((number for number, message in enumerate(messages) if message.get("reset")), default=0)
        found = [message[key] for message in messages[begin:] if key in message]
        return [item for items in found for item in items] if found and isinstance(found[0], list) else found

    def lines(self, panel: str | None = None) -> list[str]:
        """The texts of all lines."""
        return [text for _, _, text, _, _ in self.all_of("lines", panel)]

    def state(self, panel: str | None = None) -> str:
        """The state of the run."""
        states = self.all_of("state", panel)
        return str(states[-1]["state"]) if states else ""
