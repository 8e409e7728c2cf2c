"""What compiling leaves behind."""


def stop_compilers() -> None:
    """Ends the processes that torch keeps for compiling more."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
