# What makes a Python ready, once, and what it does with each run afterwards. The names of modules are its arguments.
#
# It stops itself when everything is loaded, and has said which files that were. Whoever goes on from there is a run of its own, whose request is on
# descriptor 3: a seed, a number of words, the words, its own name first, and the environment, each ended by a zero.
def _hotcell(main):
    import atexit, gc, importlib, io, os, random, signal, sys, zipimport
    from importlib import machinery

    def begin():
        """Becomes the run of the request: its program as source, name and what its main module knows."""
        with io.FileIO(3) as request:
            seed, count, *rest = request.readall().split(b"\0")[:-1]
        seed, count = int(seed), int(count)
        argv = [os.fsdecode(word) for word in rest[1:count]]
        os.environ.clear()
        for variable in rest[count:]:
            name, _, value = variable.partition(b"=")
            os.environb[name] = value
        # Nothing that was random before may be the same in two runs.
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)
        if "ssl" in sys.modules:
            sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
        if "tempfile" in sys.modules:
            sys.modules["tempfile"]._name_sequence = None
        if "multiprocessing.process" in sys.modules:
            sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
        if "uuid" in sys.modules:
            sys.modules["uuid"]._node = None
        if "time" in sys.modules:
            sys.modules["time"].tzset()
        sys.orig_argv = [sys.executable, *argv]
        # A directory that was not there may be now.
        importlib.invalidate_caches()
        parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [part for part in parts if part and part not in sys.path]
        if argv[:1] == ["-c"] and len(argv) > 1:
            sys.argv = ["-c"] + argv[2:]
            return argv[1], "<string>"
        if argv[:1] == ["-m"] and len(argv) > 1:
            sys.argv, sys.path[0] = argv[1:], os.getcwd()
            return "import runpy as _; _._run_module_as_main(%r)" % argv[1], "<module>"
        if not argv or argv[0] == "-":
            sys.argv = argv or [""]
            return sys.stdin.buffer.read(), "<stdin>"
        if argv[0].startswith("-"):
            print(f"{sys.executable}: a template is given a script, -c CODE, -m MODULE or -, not {argv[0]}", file=sys.stderr)
            end(2)
        sys.argv, name = argv, os.path.abspath(argv[0])
        if os.path.isdir(name) or is_archive(name):
            sys.path[0] = argv[0]
            return "import runpy as _; _._run_module_as_main('__main__', False)", "<directory>"
        try:
            with io.open_code(name) as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.executable}: can't open file {name!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
            end(2)
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        main["__file__"] = name
        main["__loader__"] = machinery.SourceFileLoader("__main__", name)
        return source, name

    def is_archive(name):
        """Whether it is a zip file, of which Python runs what is in it."""
        try:
            zipimport.zipimporter(name)
            return True
        except zipimport.ZipImportError:
            return False

    def run(source, name):
        """Runs the program: what it exits with, or nothing if it was interrupted."""
        try:
            exec(compile(source, name, "exec", dont_inherit=True), main)
            return 0
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return error.code or 0
            print(error.code, file=sys.stderr)
        except BaseException as error:
            # The program's own frames, without ours.
            trace = None if isinstance(error, SyntaxError) else error.__traceback__.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            if isinstance(error, KeyboardInterrupt):
                return None
        return 1

    def end(code):
        """Ends as Python does, but for taking the interpreter apart, which would touch all of its memory: threads are
        waited for, exit handlers run, and what is open is flushed."""
        try:
            if "threading" in sys.modules:
                sys.modules["threading"]._shutdown()
            atexit._run_exitfuncs()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        opened = [one for one in gc.get_objects() if isinstance(one, io.IOBase)]
        for stream in [*opened, sys.stdout, sys.stderr]:
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except BaseException:
                code = 120 if stream is sys.stdout and code == 0 else code
        if code is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)

    for name in sys.argv[1:]:
        importlib.import_module(name)
    # What Python itself makes on first use is made now.
    exec(compile("pass", "<string>", "exec", dont_inherit=True), {})
    random.seed(0)
    for name, value in list(os.environb.items()):
        os.environb[name] = value
    # What was loaded, for whoever wants to know whether it has changed since.
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    os.write(1, b"".join(os.fsencode(file) + b"\0" for file in files if isinstance(file, str)))
    gc.collect()
    gc.freeze()
    os.kill(os.getpid(), signal.SIGSTOP)
    source, name = begin()
    del main["_hotcell"]
    end(run(source, name))


_hotcell(globals())
