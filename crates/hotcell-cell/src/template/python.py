# What makes a Python ready, once, and what it does with each run afterwards. The names of modules are its arguments.
#
# It stops itself when everything is loaded. Whoever goes on from there is a run of its own, whose request is on
# descriptor 3: a seed, a number of arguments, the arguments, and the environment, each ended by a zero byte.
def _hotcell(main):
    import gc, importlib, io, os, random, signal, sys
    from importlib import machinery

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    os.kill(os.getpid(), signal.SIGSTOP)

    with io.FileIO(3) as request:
        seed, count, *rest = request.readall().split(b"\0")[:-1]
    seed, count = int(seed), int(count)
    argv = [os.fsdecode(word) for word in rest[:count]]
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

    sys.path[1:1] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if argv[:1] == ["-c"] and len(argv) > 1:
        sys.argv, source, name = ["-c"] + argv[2:], argv[1], "<string>"
    elif argv[:1] == ["-m"] and len(argv) > 1:
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        source = "import runpy as _r; _r._run_module_as_main(%r)" % argv[1]
        name = "<module>"
    elif not argv or argv[0] == "-":
        sys.argv, source, name = argv or [""], sys.stdin.buffer.read(), "<stdin>"
    else:
        sys.argv, name = argv, argv[0]
        try:
            with io.open_code(name) as file:
                source = file.read()
        except OSError as error:
            where = os.path.abspath(name)
            text = f"{sys.executable}: can't open file {where!r}: [Errno {error.errno}] {error.strerror}"
            print(text, file=sys.stderr)
            sys.exit(2)
        sys.path[0] = os.path.dirname(os.path.realpath(name))
        main["__file__"] = name
        main["__loader__"] = machinery.SourceFileLoader("__main__", name)
    del main["_hotcell"]
    try:
        exec(compile(source, name, "exec", dont_inherit=True), main)
    except SystemExit:
        raise
    except BaseException as error:
        # The user's own frames, without ours.
        trace = error.__traceback__
        trace = trace.tb_next or trace if not isinstance(error, SyntaxError) else None
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


_hotcell(globals())
