class FramePool:
    frame_bytes: int
    idle: int
    def __init__(self, frame_bytes: int, frames: int) -> None: ...
