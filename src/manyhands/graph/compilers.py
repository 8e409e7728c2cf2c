"""Cleanup after torch.compile."""


def stop_compilers() -> None:
    """Stop the worker processes that torch keeps for compilation."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
