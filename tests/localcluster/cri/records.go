package cri

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// The kinds of records, each a directory of the runtime's.
const (
	sandboxKind   = "sandboxes"
	containerKind = "containers"
)

func (s *server) recordPath(kind, id string) string { return s.path(kind, id+".json") }

func (s *server) save(kind, id string, what any) error {
	text, err := json.Marshal(what)
	if err != nil {
		return err
	}
	path := s.recordPath(kind, id)
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (s *server) forget(kind, id string) error {
	if err := os.Remove(s.recordPath(kind, id)); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

func readRecords[T any](s *server, kind string, take func(*T) error) error {
	files, err := filepath.Glob(s.recordPath(kind, "*"))
	if err != nil {
		return err
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		record := new(T)
		if err := json.Unmarshal(text, record); err != nil {
			// of another version of this program: the kubelet will ask for it anew
			fmt.Fprintf(os.Stderr, "%s can't be read and is removed: %v\n", name, err)
			if err := os.Remove(name); err != nil {
				return err
			}
			continue
		}
		if err := take(record); err != nil {
			return err
		}
	}
	return nil
}
