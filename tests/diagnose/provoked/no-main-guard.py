# ruff: noqa
import multiprocessing

multiprocessing.set_start_method("spawn", force=True)
worker = multiprocessing.Process(target=print, args=("at work",))
worker.start()
worker.join()
