package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// cborValue reads one item of RFC 8949. Strings and byte strings become string, because an apiserver writes strings as
// byte strings; tags are left out. The error is io.EOF only before the first byte.
func cborValue(reader *bufio.Reader) (interface{}, error) {
	major, info, argument, err := cborHead(reader)
	if err != nil {
		return nil, err
	}
	inner := func() (interface{}, error) {
		value, err := cborValue(reader)
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return value, err
	}
	if info == 31 {
		return nil, errors.New("cbor: an item of indefinite length")
	}
	switch major {
	case 0:
		return int64(argument), nil
	case 1:
		return -1 - int64(argument), nil
	case 2, 3:
		if argument > 64<<20 {
			return nil, fmt.Errorf("cbor: a string of %d bytes", argument)
		}
		text := make([]byte, argument)
		if _, err := io.ReadFull(reader, text); err != nil {
			return nil, io.ErrUnexpectedEOF
		}
		return string(text), nil
	case 4:
		list := []interface{}{}
		for ; argument > 0; argument-- {
			value, err := inner()
			if err != nil {
				return nil, err
			}
			list = append(list, value)
		}
		return list, nil
	case 5:
		fields := map[string]interface{}{}
		for ; argument > 0; argument-- {
			key, err := inner()
			if err != nil {
				return nil, err
			}
			name, ok := key.(string)
			if !ok {
				return nil, fmt.Errorf("cbor: the key of a map is %v", key)
			}
			if fields[name], err = inner(); err != nil {
				return nil, err
			}
		}
		return fields, nil
	case 6:
		return inner()
	}
	switch info {
	case 20, 21:
		return info == 21, nil
	case 22, 23:
		return nil, nil
	case 26:
		return float64(math.Float32frombits(uint32(argument))), nil
	case 27:
		return math.Float64frombits(argument), nil
	}
	return nil, fmt.Errorf("cbor: simple value %d", info)
}

// cborHead reads the initial byte of an item and its argument.
func cborHead(reader *bufio.Reader) (major, info byte, argument uint64, err error) {
	first, err := reader.ReadByte()
	if err != nil {
		return 0, 0, 0, err
	}
	major, info = first>>5, first&31
	switch {
	case info < 24:
		return major, info, uint64(info), nil
	case info < 28:
		var bytes [8]byte
		size := 1 << (info - 24)
		if _, err := io.ReadFull(reader, bytes[8-size:]); err != nil {
			return 0, 0, 0, io.ErrUnexpectedEOF
		}
		return major, info, binary.BigEndian.Uint64(bytes[:]), nil
	case info == 31:
		return major, info, 0, nil
	}
	return 0, 0, 0, fmt.Errorf("cbor: initial byte %#x", first)
}

// cborFrame reads one event of a CBOR sequence (RFC 8742).
func cborFrame(reader *bufio.Reader) (frame, error) {
	value, err := cborValue(reader)
	if err != nil {
		return frame{}, err
	}
	part := func(of interface{}, name string) map[string]interface{} {
		fields, _ := of.(map[string]interface{})
		inner, _ := fields[name].(map[string]interface{})
		return inner
	}
	text := func(of interface{}, name string) string {
		fields, _ := of.(map[string]interface{})
		s, _ := fields[name].(string)
		return s
	}
	object := part(value, "object")
	metadata, data := part(object, "metadata"), part(object, "data")
	code, _ := object["code"].(int64)
	f := frame{text(value, "type"), text(metadata, "name"), text(metadata, "resourceVersion"), text(data, "writer"),
		text(data, "seq"), int(code), text(object, "message")}
	if f.kind == "" || object == nil {
		return frame{}, fmt.Errorf("a frame that is no event: %.200v", value)
	}
	return f, nil
}
