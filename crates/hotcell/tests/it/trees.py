"""Random trees, from a seed: make one, change one, describe one. Used on both sides of the wall."""

import hashlib
import json
import os
import random
import stat
import sys

NAMES = [b"a", b"b.txt", b"c d", b"new\nline", b"\x1b[31mred", b"\xff\xfe", "ü".encode(), b"-dash", b"quote'\"", b"x" * 200]


def name(r):
    return r.choice(NAMES) + (b"%d" % r.randrange(4))


def contents(r):
    kind = r.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:
        return r.randbytes(r.randrange(1, 9000))
    return b"".join(b"line %d\n" % r.randrange(9) for _ in range(r.randrange(1, 40)))


def put(r, path):
    with open(path, "wb") as f:
        if r.randrange(8) == 0:
            f.seek(r.randrange(1 << 20))
        f.write(contents(r))
    os.chmod(path, r.choice([0o644, 0o600, 0o755, 0o444, 0o664]))


def everything(root=b"."):
    found = []
    for at, directories, files in os.walk(root):
        found += [os.path.join(at, one) for one in sorted(directories) + sorted(files)]
    return found


def directories():
    return [b"."] + [p for p in everything() if os.path.isdir(p) and not os.path.islink(p)]


def plain_files():
    return [p for p in everything() if stat.S_ISREG(os.lstat(p).st_mode) and os.lstat(p).st_nlink == 1]


def add(r):
    path = os.path.join(r.choice(directories()), name(r))
    if os.path.lexists(path):
        return
    kind = r.randrange(6)
    if kind < 3:
        put(r, path)
    elif kind == 3:
        os.mkdir(path)
        os.chmod(path, r.choice([0o755, 0o700, 0o775]))
    elif kind == 4:
        os.symlink(r.choice([b"a", b"/etc/passwd", b"../../..", b"\xff", b"."]), path)
    elif plain_files():
        os.link(r.choice(plain_files()), path)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        for one in os.listdir(path):
            remove(os.path.join(path, one))
        os.rmdir(path)
    else:
        os.unlink(path)


def change(r):
    paths = everything()
    if not paths:
        return add(r)
    path = r.choice(paths)
    kind = r.randrange(8)
    is_file = stat.S_ISREG(os.lstat(path).st_mode)
    is_link = os.path.islink(path)
    if kind == 0:
        remove(path)
    elif kind == 1 and not is_link:
        os.chmod(path, r.choice([0o644, 0o600, 0o444] if is_file else [0o755, 0o700, 0o555]))
    elif kind == 2:
        # Another kind of thing under the same name.
        remove(path)
        r.choice([lambda: os.mkdir(path), lambda: put(r, path), lambda: os.symlink(b"elsewhere", path)])()
    elif kind == 3 and is_file:
        with open(path, "ab") as f:
            f.write(contents(r))
    elif kind == 4 and is_file:
        # Replaced as editors do.
        put(r, path + b"~")
        os.rename(path + b"~", path)
    elif kind == 5:
        target = os.path.join(r.choice(directories()), name(r))
        if not os.path.lexists(target) and not (target + b"/").startswith(path + b"/"):
            os.rename(path, target)
    elif kind == 6 and not is_link and not is_file:
        # A directory made anew hides what was in it.
        remove(path)
        os.mkdir(path)
        add(r)
    else:
        add(r)


def many(r, n, step):
    for _ in range(n):
        try:
            step(r)
        except OSError:
            pass  # A closed directory, a rename across layers: what a program meets, too.


def picture():
    found, links = {}, {}
    for path in everything():
        s = os.lstat(path)
        mode = stat.S_IMODE(s.st_mode)
        if stat.S_ISREG(s.st_mode):
            with open(path, "rb") as f:
                what = ["file", mode, hashlib.sha256(f.read()).hexdigest(), s.st_size]
            links.setdefault((s.st_dev, s.st_ino), []).append(path.hex())
        elif stat.S_ISDIR(s.st_mode):
            what = ["directory", mode]
        else:
            what = ["link", os.readlink(path).hex()]
        found[path.hex()] = what
    groups = sorted(sorted(group) for group in links.values() if len(group) > 1)
    return json.dumps({"paths": found, "groups": groups}, sort_keys=True)


if __name__ == "__main__":
    what, seed = sys.argv[1], int(sys.argv[2])
    r = random.Random("%s %d" % (what, seed))
    if what == "make":
        many(r, 30, add)
    elif what == "change":
        many(r, r.randrange(1, 40), change)
    print(picture())
