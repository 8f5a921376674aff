"""Reads CBOR (RFC 8949) as an apiserver writes it: strings may be byte strings, and the order of keys is random."""


def decode(data):
    """The one item in `data`."""
    value, rest = item(memoryview(data))
    if len(rest):
        raise ValueError(f"{len(rest)} bytes after the item")
    return value


def item(data):
    """The first item and the bytes after it."""
    major, info, data = data[0] >> 5, data[0] & 31, data[1:]
    argument = info
    if 24 <= info < 28:
        size = 1 << (info - 24)
        argument, data = int.from_bytes(data[:size], "big"), data[size:]
    if major in (0, 1):
        return (argument if major == 0 else -1 - argument), data
    if major in (2, 3):
        return bytes(data[:argument]).decode(), data[argument:]
    if major == 4:
        values = []
        for _ in range(argument):
            value, data = item(data)
            values.append(value)
        return values, data
    if major == 5:
        fields = {}
        for _ in range(argument):
            key, data = item(data)
            fields[key], data = item(data)
        return fields, data
    if major == 6:  # a tag, for example that of CBOR itself
        return item(data)
    return {20: False, 21: True, 22: None}[info], data
